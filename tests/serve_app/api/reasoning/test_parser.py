import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.formats.reasoning_format import DEEPSEEK_R1, QWEN3, PromptReasoning
from serve_app.api.reasoning.parser import ReasoningParser, SplitText
from tests.offenders import for_each

OPEN, BEGUN, ENDED = PromptReasoning.OPEN, PromptReasoning.BEGUN, PromptReasoning.ENDED
PROMPTS = pytest.mark.parametrize("prompt", list(PromptReasoning))
FRAGMENTS = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "</", "<", "nk>", "\n", "\n\n", " ", "a", "ö"])
    | st.text(max_size=3),
    max_size=12,
).map("".join)
PLACES = st.lists(st.integers(min_value=0), max_size=12)


def split(pieces: list[str], prompt: PromptReasoning) -> SplitText:
    parser = ReasoningParser(QWEN3, prompt)
    told = SplitText()
    for piece in pieces:
        told += parser.feed(piece)
    return told + parser.finish()


@for_each(
    (OPEN, "<think>\nHm.\n\nSo.\n</think>\n\nYes.\n", "Hm.\n\nSo.", "Yes.\n"),
    (OPEN, "<think>\n\n</think>\n\nYes.", "", "Yes."),
    (OPEN, "Yes.", "", "Yes."),
    (OPEN, "In HTML <think>x</think>", "", "In HTML <think>x</think>"),
    (OPEN, "<think>Hm.</think>  code <think>", "Hm.", "  code <think>"),
    (OPEN, "<thi", "", "<thi"),
    (OPEN, "", "", ""),
    (BEGUN, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    (BEGUN, "<think>\nHm.\n</think>Yes.", "Hm.", "Yes."),
    (BEGUN, "\n</think>\n\nYes.", "", "Yes."),
    (BEGUN, "Hm, so\n", "Hm, so", ""),
    (BEGUN, "<thi", "<thi", ""),
    (BEGUN, "a < b </thin", "a < b </thin", ""),
    (ENDED, "<think>Yes.</think>", "", "<think>Yes.</think>"),
)
def test_the_reasoning_at_the_beginning_is_split_off(
    prompt: PromptReasoning, text: str, reasoning: str, content: str
) -> None:
    assert split([text], prompt) == SplitText(reasoning, content)
    assert split(list(text), prompt) == SplitText(reasoning, content)


@PROMPTS
@given(text=FRAGMENTS, places=PLACES)
def test_the_split_does_not_depend_on_the_pieces_and_loses_only_marks_and_breaks(
    prompt: PromptReasoning, text: str, places: list[int]
) -> None:
    cuts = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    told = split([text], prompt)
    assert split([text[a:b] for a, b in pairwise(cuts)], prompt) == told
    assert split(list(text), prompt) == told
    reasoning, content = re.escape(told.reasoning), re.escape(told.content)
    parts = rf"\n*(<think>)?\n*{reasoning}\n*(</think>)?\n*{content}\n*"
    assert re.fullmatch(parts, text) is not None


def test_reasoning_is_told_as_it_arrives() -> None:
    parser = ReasoningParser(QWEN3, OPEN)
    pieces = ["<thi", "nk>\n", "Hm", ".\n", "So", "\n</th", "ink>", "\n\n", "Y", "es"]
    told = [parser.feed(piece) for piece in pieces]
    assert told == [
        SplitText(),
        SplitText(),
        SplitText("Hm"),
        SplitText("."),
        SplitText("\nSo"),
        SplitText(),
        SplitText(),
        SplitText(),
        SplitText(content="Y"),
        SplitText(content="es"),
    ]


@for_each(
    ("user\nHi<|end|>\n<|assistant|>\n", OPEN),
    ("user\nI wrote <think><|end|>\n<|assistant|>\n", OPEN),
    ("<|assistant|>\n<think>\n", BEGUN),
    ("<|assistant|><think>", BEGUN),
    ("<|assistant|>\n<think>\n\n</think>\n\n", ENDED),
)
def test_the_end_of_the_prompt_says_where_the_answer_begins(
    end: str, told: PromptReasoning
) -> None:
    assert QWEN3.at_end_of(end) is told
    assert DEEPSEEK_R1.at_end_of(end) is (BEGUN if told is OPEN else told)
