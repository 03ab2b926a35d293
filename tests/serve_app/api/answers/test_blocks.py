from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from deployments.contract.formats.reasoning_format import REASONING_FORMATS, PromptReasoning
from deployments.contract.formats.tool_call_format import FORMATS
from deployments.contract.messages import Tool
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import ReasoningTokens
from serve_app.api.answers.blocks import Block, BlockReader, CallMade, joined
from serve_app.api.answers.reader import Finished
from serve_app.api.reasoning.parser import Reasoning
from serve_app.api.reasoning.separation import Separation
from serve_app.api.structured.tool_grammar import OfferedFunction
from serve_app.api.tools.offer import ToolOffer
from serve_app.api.tools.parsing.events import Text

TOOL = Tool("f", None, "{}")
OFFER = ToolOffer((TOOL,), (OfferedFunction(TOOL, False, "", ""),), FORMATS["hermes"])
REASONING = Separation(REASONING_FORMATS["qwen3"], ReasoningTokens(8, 9), PromptReasoning.OPEN)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
PIECES = st.sampled_from(
    ["<think>", "</think>", "Hm. ", "\n", CALL, CALL[:40], CALL[20:], '"', "}", "Yes.", "<tool"]
)
FINISHES = st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])


def read(pieces: list[str], finish: FinishReason) -> tuple[list[Block], Finished]:
    """Return the blocks of an answer that arrives in pieces, without the calls' random ids."""
    reader = BlockReader(OFFER, REASONING)
    events = [event for piece in pieces for event in reader.feed(TextDelta((1,), piece))]
    *rest, finished = reader.feed(TextDelta((2,), "", finish))
    assert isinstance(finished, Finished)
    assert not any(isinstance(event, Finished) for event in events)
    return [nameless(block) for block in joined([*events, *rest])], finished


def nameless(block: Block) -> Block:
    if not isinstance(block, CallMade):
        return block
    call = block.call
    return CallMade(type(call)("", call.name, call.arguments), block.is_whole)


@given(st.lists(PIECES, max_size=8), FINISHES, st.integers(1, 9))
def test_the_blocks_do_not_depend_on_the_pieces_that_the_text_arrives_in(
    pieces: list[str], finish: FinishReason, size: int
) -> None:
    text = "".join(pieces)
    cut = [text[at : at + size] for at in range(0, len(text), size)]
    assert read(cut, finish) == read([text], finish)


@given(st.lists(PIECES, max_size=8), FINISHES)
def test_no_block_is_empty_and_texts_are_joined(pieces: list[str], finish: FinishReason) -> None:
    blocks, _ = read(pieces, finish)
    texts = [block for block in blocks if isinstance(block, Text | Reasoning)]
    assert all(block.text for block in texts)
    assert not any(
        type(block) is type(following) and not isinstance(block, CallMade)
        for block, following in pairwise(blocks)
    )


def test_reasoning_text_and_calls_come_in_the_order_of_the_text() -> None:
    blocks, finished = read(["<think>Hm.</think>Well. ", CALL], FinishReason.STOP)
    assert [type(block) for block in blocks] == [Reasoning, Text, CallMade]
    assert (finished.reason, finished.stop) == ("tool_calls", None)


def test_a_cut_call_is_not_whole_and_does_not_count_as_a_call() -> None:
    (block,), finished = read([CALL[:45]], FinishReason.LENGTH)
    assert isinstance(block, CallMade)
    assert not block.is_whole
    assert finished.reason == "length"


@pytest.mark.parametrize("written", ["{a: 1", '{"a": foo', '{"a": "C:\\q", ', ""])
def test_of_a_cut_call_whose_arguments_are_no_json_nothing_is_told(written: str) -> None:
    text = f'<tool_call>\n{{"name": "f", "arguments": {written}'
    (block,), _ = read([text], FinishReason.LENGTH)
    assert isinstance(block, CallMade)
    assert (block.arguments, block.is_whole) == ("", False)


def test_half_a_surrogate_pair_is_replaced_in_the_arguments_of_a_call() -> None:
    text = CALL.replace("1", r'"\ud83d \ud83d\ude00"')
    (block,), _ = read([text], FinishReason.STOP)
    assert isinstance(block, CallMade)
    assert from_json(block.arguments) == {"a": "\ufffd \U0001f600"}
