from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.answers.channel_reader import ChannelReader
from serve_app.api.reasoning.parser import Reasoning
from serve_app.api.tools.parsing.events import (
    ArgumentsGained,
    CallBroken,
    CallCut,
    CallEnded,
    CallStarted,
    Event,
    Text,
)

NAMES = frozenset({"get", "get_time"})
HM = "<|channel|>analysis<|message|>Hm. Rain?<|end|>"
NEXT = "<|start|>assistant"
RAIN = "<|channel|>final<|message|>It rains."
REMARK = "<|channel|>commentary<|message|>I look.<|end|>"
ROME = '{"city": "Rome"}'
BEFORE = f" to=functions.get<|channel|>commentary json<|message|>{ROME}"
AFTER = f"<|channel|>commentary to=functions.get <|constrain|>json<|message|>{ROME}"
LONG = "<|channel|>final" + "x" * 600

Told = tuple[str, str, list[tuple[str, str, str]]]
"""The reasoning, the text, and the calls with how each ended."""


def put_together(events: list[Reasoning | Event]) -> Told:
    reasoning, text, calls = "", "", list[tuple[str, str, str]]()
    begun = arguments = ""
    for event in events:
        match event:
            case Reasoning(gained):
                reasoning += gained
            case Text(gained) | CallBroken(_, gained):
                text += gained
            case CallStarted(_, name):
                begun, arguments = name, ""
            case ArgumentsGained(_, gained):
                arguments += gained
            case CallEnded():
                calls.append((begun, arguments, "whole"))
            case CallCut():
                calls.append((begun, arguments, "cut"))
    return reasoning, text, calls


def read(*pieces: str, is_cut: bool = False, **options: Any) -> Told:
    reader = ChannelReader(NAMES, **options)
    told = [event for piece in pieces for event in reader.feed(piece)]
    return put_together([*told, *reader.finish(is_cut=is_cut)])


WHOLE: dict[str, tuple[str, Told]] = {
    "reasoning and answer": (HM + NEXT + RAIN, ("Hm. Rain?", "It rains.", [])),
    "an answer at once": (RAIN, ("", "It rains.", [])),
    "a mark at the end": (RAIN + "<|return|>", ("", "It rains.", [])),
    "a call, named first": (BEFORE, ("", "", [("get", ROME, "whole")])),
    "a call after reasoning": (
        HM + NEXT + AFTER + "<|call|>", ("Hm. Rain?", "", [("get", ROME, "whole")]),
    ),
    "a remark and a call": (
        HM + NEXT + REMARK + NEXT + BEFORE, ("Hm. Rain?", "I look.", [("get", ROME, "whole")]),
    ),
    "more reasoning": (
        HM + NEXT + REMARK + NEXT + HM + NEXT + RAIN,
        ("Hm. Rain?\nHm. Rain?", "I look.\n\nIt rains.", []),
    ),
    "two calls": (
        BEFORE + "<|call|>" + NEXT + AFTER,
        ("", "", [("get", ROME, "whole"), ("get", ROME, "whole")]),
    ),
    "a tool of another kind": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>" + NEXT + RAIN,
        ("print(1)", "It rains.", []),
    ),
    "a function that was not offered": (
        AFTER.replace(".get", ".other"), ("", ROME, []),
    ),
    "arguments that are no object": (
        BEFORE.replace(ROME, "[1]") + "<|call|>" + NEXT + RAIN, ("", "[1]\n\nIt rains.", []),
    ),
    "arguments that break": (
        BEFORE.replace(ROME, '{"a": 1}}') + "<|call|>", ("", '{"a": 1}}', []),
    ),
    "arguments that end early": (BEFORE.replace(ROME, '{"a": '), ("", '{"a": ', [])),
    "no header": ("It rains.", ("", "It rains.", [])),
    "a header without an end": (LONG, ("", LONG, [])),
    "no end of a message": (
        HM.removesuffix("<|end|>") + NEXT + RAIN, ("Hm. Rain?", "It rains.", []),
    ),
    "half a mark as text": (RAIN + " a <| b <|end", ("", "It rains. a <| b <|end", [])),
    "nothing": ("", ("", "", [])),
}  # fmt: skip


@pytest.mark.parametrize(("text", "told"), WHOLE.values(), ids=WHOLE)
def test_an_answer_is_told_by_its_channels_however_it_arrives(text: str, told: Told) -> None:
    assert read(text) == told
    assert read(*text) == told


@settings(max_examples=200)
@given(text=st.sampled_from([text for text, _ in WHOLE.values()]), places=st.lists(st.integers(0)))
def test_where_an_answer_is_cut_into_pieces_changes_nothing(text: str, places: list[int]) -> None:
    cuts = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    assert read(*(text[a:b] for a, b in pairwise(cuts))) == read(text)


@pytest.mark.parametrize("text", [HM + NEXT + RAIN, HM + NEXT + REMARK + NEXT + AFTER])
def test_an_answer_that_is_cut_anywhere_never_holds_a_mark(text: str) -> None:
    reasoning, content, calls = read(text)
    for end in range(len(text)):
        found = read(text[:end], is_cut=True)
        assert reasoning.startswith(found[0])
        assert content.startswith(found[1])
        for name, arguments, how in found[2]:
            assert (name, how) == ("get", "cut")
            assert calls[0][1].startswith(arguments)


def test_after_the_most_calls_nothing_more_is_told() -> None:
    text = BEFORE + "<|call|>" + NEXT + AFTER + "<|call|>" + NEXT + RAIN
    assert read(text, max_calls=1) == ("", "", [("get", ROME, "whole")])
    assert read(*text, max_calls=1) == ("", "", [("get", ROME, "whole")])
