"""Tells which prompts are encoded sooner than another thread could take them over.

On a busy machine a change of threads and back takes milliseconds: each thread waits for a core and
for Python's lock.
"""

from collections.abc import Iterable
from math import inf
from typing import Final

from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, TextPart

MAX_CHARACTERS: Final = 4096
"""About a millisecond of rendering and tokenizing, for which the event loop stands still."""


def are_brief(requests: Iterable[GenerationRequest]) -> bool:
    """Return whether encoding all these prompts takes about a millisecond at most."""
    return sum(map(_num_characters, requests)) <= MAX_CHARACTERS


def _num_characters(request: GenerationRequest) -> float:
    """Return the length of a prompt's text; infinity for more than text."""
    if request.tools or request.template_kwargs:
        return inf
    if isinstance(request.prompt, str):
        return len(request.prompt)
    return sum(map(_num_characters_of_part, request.prompt))


def _num_characters_of_part(part: ChatMessage | int) -> float:
    if isinstance(part, int):
        return 1  # a token id is not encoded, only copied
    if part.tool_calls or part.reasoning_content:
        return inf
    return sum(len(each.text) if isinstance(each, TextPart) else inf for each in part.parts)
