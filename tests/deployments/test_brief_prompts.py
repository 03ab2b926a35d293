from dataclasses import replace

import pytest

from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, ImagePart, TextPart, Tool, ToolCall
from deployments.contract.sampling_params import SamplingParams
from deployments.generator_replica import MAX_BRIEF_CHARACTERS, are_brief

LONGEST = GenerationRequest("r", "x" * MAX_BRIEF_CHARACTERS, SamplingParams())
CHAT = (ChatMessage("user", (TextPart("x" * (MAX_BRIEF_CHARACTERS - 1)), TextPart("x"))),)
CALL = ChatMessage("assistant", (), (ToolCall("1", "f", "{}"),))


def test_short_texts_are_brief() -> None:
    assert are_brief([LONGEST])
    assert are_brief([replace(LONGEST, prompt=CHAT)])
    assert are_brief([replace(LONGEST, prompt=(1,) * MAX_BRIEF_CHARACTERS)])


def test_texts_are_counted_together() -> None:
    assert not are_brief([LONGEST, replace(LONGEST, prompt="x")])


@pytest.mark.parametrize(
    "request_",
    [
        replace(LONGEST, prompt=LONGEST.prompt + "x"),  # type: ignore[operator] # it is a string
        replace(LONGEST, prompt=(*CHAT, ChatMessage("user", (TextPart("x"),)))),
        replace(LONGEST, prompt=(ChatMessage("user", (ImagePart(b""),)),)),
        replace(LONGEST, prompt=(CALL,)),
        replace(LONGEST, prompt=(ChatMessage("assistant", (), reasoning_content="x"),)),
        replace(LONGEST, prompt="x", tools=(Tool("f", None, "{}"),)),
        replace(LONGEST, prompt="x", template_kwargs=(("a", "b"),)),
    ],
)
def test_long_texts_and_more_than_text_are_not_brief(request_: GenerationRequest) -> None:
    assert not are_brief([request_])
