import re

import pytest

from deployments.contract.formats.tool_call_format import (
    HERMES,
    LLAMA3_JSON,
    MISTRAL,
    ToolCallFormat,
)
from deployments.contract.messages import Tool
from deployments.contract.output import FinishReason, TextDelta
from serve_app.api.answers.reader import AnswerReader, CallBegun, Finished, new_call_id
from serve_app.api.structured.tool_grammar import OfferedFunction
from serve_app.api.tools.offer import ToolOffer
from serve_app.api.tools.parsing.events import ArgumentsGained, CallBroken, CallEnded, Text

TOOL = Tool("f", None, "{}")
OFFER = ToolOffer((TOOL,), (OfferedFunction(TOOL, False, "", ""),), HERMES)


def test_a_call_begins_grows_and_ends() -> None:
    reader = AnswerReader(OFFER, None)
    text = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    begun, *found = (
        *reader.feed(TextDelta((1,), text[:40])),
        *reader.feed(TextDelta((2,), text[40:], FinishReason.STOP)),
    )
    assert isinstance(begun, CallBegun)
    assert (begun.index, begun.name) == (0, "f")
    assert found == [
        ArgumentsGained(0, '{"'),
        ArgumentsGained(0, 'a": 1}'),
        CallEnded(0),
        Finished("tool_calls", None),
    ]


def test_a_broken_call_is_followed_by_its_rest_as_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {]}'
    _, *found = AnswerReader(OFFER, None).feed(TextDelta((1,), text, FinishReason.STOP))
    raw = text.removesuffix("]}")
    assert found == [
        ArgumentsGained(0, "{"), CallBroken(0, raw), Text("]}"), Finished("stop", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "pattern"),
    [
        (HERMES, "call_[a-zA-Z0-9]{24}"),
        (LLAMA3_JSON, "call_[a-zA-Z0-9]{24}"),
        (MISTRAL, "[a-zA-Z0-9]{9}"),
    ],
)
def test_a_call_has_an_id_that_its_template_accepts(known: ToolCallFormat, pattern: str) -> None:
    ids = [new_call_id(known) for _ in range(100)]
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)
    assert len(set(ids)) == 100
