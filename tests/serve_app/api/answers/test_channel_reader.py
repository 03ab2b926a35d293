from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.api.answers.channel_reader import MAX_HEADER_LENGTH, ChannelReader
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

PARTS = (
    *("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<|constrain|>json", "analysis", "final", "commentary", "assistant", " to=functions.get"),
    *(ROME, '{"a', "It rains", "t", "to", "<", "<|", " ", "\n", "x" * MAX_HEADER_LENGTH),
)
"""What answers are made of, in any order."""

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
    "a header that its message's end follows": (
        "<|channel|>analysis<|end|>" + NEXT + RAIN, ("", "It rains.", []),
    ),
    "a header that another follows": (
        "<|channel|>analysis" + NEXT + RAIN, ("", "It rains.", []),
    ),
    "a channel that another follows": (
        "<|channel|>analysis" + RAIN, ("", "It rains.", []),
    ),
    "two ends of a message": (RAIN + "<|end|><|return|>", ("", "It rains.", [])),
    "text that begins like a header": ("to", ("", "to", [])),
    "text that begins like a mark": ("<", ("", "<", [])),
    "text that names no function": ("to=x is", ("", "to=x is", [])),
    "text like a header before an end": ("to=x is<|end|>" + RAIN, ("", "to=x is\n\nIt rains.", [])),
    "half a header before a mark": ("to<|message|>", ("", "to<|message|>", [])),
    "the longest header": (
        "<|channel|>final".ljust(MAX_HEADER_LENGTH) + "<|message|>It rains.", ("", "It rains.", []),
    ),
    "half a mark as text": (RAIN + " a <| b <|end", ("", "It rains. a <| b <|end", [])),
    "nothing": ("", ("", "", [])),
}  # fmt: skip


@pytest.mark.parametrize(("text", "told"), WHOLE.values(), ids=WHOLE)
def test_an_answer_is_told_by_its_channels_however_it_arrives(text: str, told: Told) -> None:
    assert read(text) == told
    assert read(*text) == told


WHOLE_TEXTS = st.sampled_from([text for text, _ in WHOLE.values()])
ANY_TEXTS = st.lists(st.sampled_from(PARTS), max_size=9).map("".join)


@settings(max_examples=400)
@given(text=WHOLE_TEXTS | ANY_TEXTS, places=st.lists(st.integers(0)), is_cut=st.booleans())
def test_where_an_answer_is_cut_into_pieces_changes_nothing(
    text: str, places: list[int], is_cut: bool
) -> None:
    cuts = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    whole = read(text, is_cut=is_cut)
    assert read(*(text[a:b] for a, b in pairwise(cuts)), is_cut=is_cut) == whole
    assert read(*text, is_cut=is_cut) == whole


def test_an_answer_that_is_cut_in_what_may_be_a_header_shows_none_of_it() -> None:
    for text in ("t", "to=func", "<|cha", "<|channel|>final"):
        assert read(HM + text, is_cut=True) == ("Hm. Rain?", "", [])


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
