"""The forms in which chat templates read a message's content, and the probes to tell them apart.

Some templates join a content to other text and need a string; others go through its parts and find
none in a string. Each fails in silence on the other form: it drops the user's text, or writes
Python's notation of a list into the prompt.
"""

import re
from collections.abc import Sequence
from enum import Enum
from typing import Final

from deployments.contract.messages import ChatMessage, ImagePart, TextPart, Tool, ToolCall

Content = str | list[dict[str, str]]

PROBE_NAME: Final = "probe_of_tools"
PROBE_ID: Final = "probe0001"
"""Mistral's templates require nine letters and digits."""

PROBE_TOOL: Final = Tool(PROBE_NAME, "A probe.", '{"type": "object", "properties": {}}')
QUESTION: Final = ChatMessage("user", (TextPart("?"),))
PROBE_CALL: Final = ChatMessage(
    "assistant", (), tool_calls=(ToolCall(PROBE_ID, PROBE_NAME, '{"key": "value"}'),)
)

FIRST: Final = "firstprobe"
SECOND: Final = "secondprobe"
TEXTS: Final = (TextPart(FIRST), TextPart(SECOND))
TEXTS_AND_IMAGE: Final = (TextPart(FIRST), ImagePart(b""), TextPart(SECOND))

_QUOTE: Final = r"\\*['\"]"
_TYPE: Final = rf"{_QUOTE}type{_QUOTE}\s*:\s*{_QUOTE}text{_QUOTE}"
_TEXT: Final = rf"{_QUOTE}text{_QUOTE}\s*:\s*{_QUOTE}{FIRST}[^'\"]*{_QUOTE}"
_WRITTEN_PART = re.compile(rf"{_TYPE}\s*,\s*{_TEXT}|{_TEXT}\s*,\s*{_TYPE}")
"""The first text's part as a whole, written by Python or as JSON in either order, not read."""


class ContentForm(Enum):
    """A form of a message's content.

    `TEXT` is a string. `PARTS` is a list of parts as the client sent them; each image is one.
    `ONE_PART` is a list of one part, with the whole text.
    """

    TEXT = "text"
    PARTS = "parts"
    ONE_PART = "one part"

    def write(self, parts: Sequence[TextPart | ImagePart], image_token: str | None) -> Content:
        """Return a content in this form.

        Where images are no parts, their tokens come before the text, a line each, as vLLM does.

        Args:
            parts: The content.
            image_token: What stands for an image in a text; None if there is no such token.
        """
        if self is ContentForm.PARTS:
            return [
                {"type": "text", "text": part.text}
                if isinstance(part, TextPart)
                else {"type": "image"}
                for part in parts
            ]
        text = "".join(part.text for part in parts if isinstance(part, TextPart))
        num_images = sum(isinstance(part, ImagePart) for part in parts)
        text = "\n".join([*[image_token or ""] * num_images, text])
        if self is ContentForm.TEXT:
            return text
        return [{"type": "text", "text": text}] if parts else []


TEXT_FORMS: Final = (ContentForm.TEXT, ContentForm.ONE_PART)
"""Forms for models without images, the first that a template reads is taken."""

IMAGE_FORMS: Final = (ContentForm.PARTS, ContentForm.TEXT, ContentForm.ONE_PART)
"""Forms for models with images, likewise."""


def conversations(role: str, parts: Sequence[TextPart | ImagePart]) -> list[list[ChatMessage]]:
    """Return conversations with a message of this role and content, as templates want them."""
    of_user, of_system = ChatMessage("user", tuple(parts)), ChatMessage("system", tuple(parts))
    answer = ChatMessage("assistant", tuple(parts))
    result = ChatMessage("tool", tuple(parts), (), PROBE_ID, PROBE_NAME)
    return {
        "user": [[of_user], [ChatMessage("system", (TextPart("."),)), of_user]],
        "system": [[of_system, QUESTION]],
        "assistant": [[QUESTION, answer, QUESTION], [QUESTION, answer]],
        "tool": [[QUESTION, PROBE_CALL, result]],
    }[role]


def shows_texts(prompt: str) -> bool:
    """Return whether a probe's texts are in a prompt, and no part was written out as a whole."""
    folded = prompt.casefold()
    return FIRST in folded and SECOND in folded and not _WRITTEN_PART.search(folded)
