"""A grammar in the engine: what it allows, when it ends, and whom it must leave alone."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from deployments.engine.grammar import GrammarCompiler, unpack
from deployments.engine.output import FinishReason
from deployments.engine.sampler import sample
from deployments.engine.sampling_params import InvalidParameterError, SamplingParams
from deployments.engine.sampling_row import SamplingRow
from deployments.engine.sequence import SequenceRequest
from tests.engine.collector import Collector, run_staggered, sampled_requests
from tests.engine.faults import FaultyModel, out_of_memory_above
from tests.engine.tiny_models import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    byte_tokenizer,
    llama,
    load,
    make_engine,
)

PROMPT = (60, 61, 62)
ENUM: Any = {"enum": ["red", "green", "blue"]}
OBJECT: Any = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 5}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
DEAD_END: Any = {
    "$defs": {"loop": {"$ref": "#/$defs/loop"}},
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/loop"}},
    "required": ["x"],
    "additionalProperties": False,
}


def json_grammar(schema: Any) -> str:
    options: Any = {"whitespace_flexible": False}
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def ids_of(text: str) -> list[int]:
    found: list[int] = byte_tokenizer()(text)["input_ids"]
    return found


def request(schema: Any, name: str = "s", **params: Any) -> SequenceRequest:
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 60} | params
    return SequenceRequest(name, PROMPT, SamplingParams(grammar=json_grammar(schema), **params))


def run(schema: Any, **params: Any) -> tuple[str, FinishReason | None]:
    collector = run_staggered(make_engine(load(llama)), [request(schema, **params)])
    return collector.text("s"), collector.finish_reason("s")


@pytest.mark.parametrize("schema", [ENUM, OBJECT])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.3},
        {"repetition_penalty": 50.0, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": ((EOS_TOKEN_ID, 100.0), (ids_of('"')[0], -100.0))},
        {"min_tokens": 60},
        {"ignore_eos": True},
    ],
    ids=str,
)
def test_the_text_is_whole_and_valid_whatever_else_is_asked(
    schema: Any, params: Mapping[str, Any]
) -> None:
    text, reason = run(schema, **params)
    answer = json.loads(text)
    assert answer in ENUM["enum"] if schema is ENUM else set(answer) == {"a", "b"}
    assert reason is FinishReason.STOP


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 2), (4, 4), (60, 5)])
def test_a_text_that_could_go_on_ends_by_the_models_own_end_but_not_before_min_tokens(
    min_tokens: int, length: int
) -> None:
    bias = ((EOS_TOKEN_ID, 100.0),)
    text, reason = run(
        {"type": "integer", "minimum": 10, "maximum": 99999},
        logit_bias=bias,
        min_tokens=min_tokens,
    )
    assert (len(text), reason) == (length, FinishReason.STOP)


def test_a_text_may_be_cut_by_its_length() -> None:
    text, reason = run(OBJECT, max_tokens=4)
    assert (text, reason) == ('{"a"', FinishReason.LENGTH)


def test_a_text_that_is_whole_with_its_last_token_was_not_cut() -> None:
    assert run({"const": "ab"}, max_tokens=4) == ('"ab"', FinishReason.STOP)


def test_a_stop_string_ends_the_text_before_the_grammar_does() -> None:
    assert run(OBJECT, stop=("a",)) == ('{"', FinishReason.STOP)


def test_the_seed_alone_decides_between_the_texts_that_are_allowed() -> None:
    texts = {seed: run(OBJECT, seed=seed)[0] for seed in range(4)}
    assert len(set(texts.values())) == 4
    assert texts == {seed: run(OBJECT, seed=seed)[0] for seed in range(4)}


def test_answers_to_one_request_follow_the_grammar_each_by_itself() -> None:
    asked = request(OBJECT)
    choices = [
        replace(asked, sequence_id=str(i), params=asked.params.of_choice(i)) for i in range(3)
    ]
    collector = run_staggered(make_engine(load(llama)), choices)
    assert len({collector.text(str(i)) for i in range(3)}) == 3
    for i in range(3):
        assert set(json.loads(collector.text(str(i)))) == {"a", "b"}


def test_neither_bound_nor_free_rows_notice_each_other() -> None:
    free = sampled_requests(Random(7))
    bound = [request(OBJECT, f"b{seed}", seed=seed) for seed in range(3)]
    mixed = [each for pair in zip(free, bound, strict=False) for each in pair] + free[3:]
    together = run_staggered(make_engine(load(llama), num_slots=8), mixed)
    for each in mixed:
        name = each.sequence_id
        alone = run_staggered(make_engine(load(llama)), [each])
        assert together.token_ids(name) == alone.token_ids(name)


def test_a_sequence_that_is_resumed_elsewhere_goes_on_within_the_grammar() -> None:
    asked = request(OBJECT)
    whole = run_staggered(make_engine(load(llama)), [asked]).token_ids("s")
    for cut in range(1, len(whole)):
        resumed = replace(asked, generated_token_ids=tuple(whole[:cut]))
        rest = run_staggered(make_engine(load(llama)), [resumed]).token_ids("s")
        assert whole[:cut] + rest == whole


def test_preempted_sequences_go_on_within_the_grammar() -> None:
    asked = [request(OBJECT, f"s{seed}", seed=seed) for seed in range(3)]
    expected = run_staggered(make_engine(load(llama)), asked)
    loaded = load(llama)
    engine = make_engine(loaded)
    faulty = FaultyModel(loaded, lambda _: None)
    collector = Collector(engine)
    for each in asked:
        engine.add(each)
    for _ in range(4):
        collector.step()
    faulty.fault = out_of_memory_above(2)
    collector.step()
    assert engine.stats.num_waiting
    faulty.fault = lambda _: None
    collector.run()
    for each in asked:
        assert collector.token_ids(each.sequence_id) == expected.token_ids(each.sequence_id)


def test_a_grammar_that_leads_nowhere_ends_its_own_sequence_with_an_error() -> None:
    engine = make_engine(load(llama))
    collector = run_staggered(engine, [request(DEAD_END, "dead"), request(OBJECT, "good")])
    last = collector.deltas["dead"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert "response_format" in last.error
    assert collector.finish_reason("good") is FinishReason.STOP


def test_an_aborted_sequence_leaves_nothing_behind() -> None:
    engine = make_engine(load(llama))
    engine.add(request(OBJECT))
    collector = Collector(engine)
    collector.step()
    engine.abort("s")
    engine.check()
    assert not engine.has_work


@pytest.mark.parametrize("grammar", ["{", "start: missing", json_grammar({"not": {}})])
def test_a_broken_grammar_is_refused_by_the_name_of_its_field(grammar: str) -> None:
    asked = SequenceRequest("s", PROMPT, SamplingParams(grammar=grammar))
    engine = make_engine(load(llama))
    with pytest.raises(InvalidParameterError) as refused:
        engine.compile_grammar(asked)
    assert refused.value.param == "response_format"
    with pytest.raises(InvalidParameterError):
        engine.add(asked)
    engine.check()


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"enum": []}], ids=str)
def test_a_schema_that_no_text_is_valid_by_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidParameterError):
        make_engine(load(llama)).compile_grammar(request(schema))


def test_generated_tokens_that_break_the_grammar_are_refused() -> None:
    engine = make_engine(load(llama))
    with pytest.raises(InvalidParameterError):
        engine.add(replace(request(ENUM), generated_token_ids=tuple(ids_of('"x'))))


def test_a_request_is_compiled_once() -> None:
    engine = make_engine(load(llama))
    compiled = engine.compile_grammar(request(ENUM))
    assert compiled.matcher is not None
    assert engine.compile_grammar(compiled) is compiled
    free = sampled_requests(Random(7))[0]
    assert engine.compile_grammar(free) is free


def compiler(vocab_size: int = VOCAB_SIZE) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), vocab_size, {EOS_TOKEN_ID})


def allowed(bitmask: torch.Tensor, vocab_size: int = VOCAB_SIZE) -> list[int]:
    (barred,) = unpack(bitmask[None], vocab_size)
    return [i for i, is_barred in enumerate(barred.tolist()) if not is_barred]


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 13, VOCAB_SIZE, VOCAB_SIZE + 1, 512])
def test_logits_may_be_wider_or_narrower_than_the_tokenizer(vocab_size: int) -> None:
    matcher = compiler(vocab_size).compile(json_grammar({}))
    assert set(allowed(matcher.bitmask(), vocab_size)) == set(ids_of('{["-0123456789tfn'))
    for token_id in ids_of('"'):
        matcher.advance(token_id)
    behind = allowed(matcher.bitmask(), vocab_size)
    assert ids_of("a")[0] in behind
    assert max(behind) < min(vocab_size, VOCAB_SIZE)
    # No special token is text; <pad> is an ordinary one here.
    assert not set(behind) & set(range(1, 44))


def test_a_tokenizer_that_cannot_be_read_is_refused_by_the_name_of_the_field() -> None:
    tokenizer: Any = object()
    with pytest.raises(InvalidParameterError, match="tokenizer") as refused:
        GrammarCompiler(tokenizer, VOCAB_SIZE, {EOS_TOKEN_ID}).compile(json_grammar({}))
    assert refused.value.param == "response_format"


def test_tokens_are_barred_unless_the_grammar_allows_no_other() -> None:
    matcher = compiler().compile(json_grammar({"enum": ["a", "b"]}))
    (quote,), (a,), (b,) = ids_of('"'), ids_of("a"), ids_of("b")
    assert allowed(matcher.bitmask({quote})) == [quote]
    assert allowed(matcher.bitmask({quote, a})) == [quote]
    matcher.advance(quote)
    assert allowed(matcher.bitmask({a})) == [b]
    assert allowed(matcher.bitmask({a, b})) == [a, b]
    assert allowed(matcher.bitmask()) == [a, b]


def test_a_matcher_that_has_failed_allows_nothing_and_tells_why() -> None:
    matcher = compiler().compile(json_grammar(ENUM))
    assert not matcher.advance(ids_of("x")[0])
    assert matcher.error
    assert "\n" not in matcher.error
    assert allowed(matcher.bitmask()) == []
    assert not matcher.advance(ids_of('"')[0])


@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4))
def test_a_bitmask_is_unpacked_bit_by_bit(words: list[int]) -> None:
    vocab_size = 32 * len(words) - 5
    expected = [i for i in range(vocab_size) if words[i // 32] >> i % 32 & 1]
    assert allowed(torch.tensor(words, dtype=torch.int32), vocab_size) == expected


def bits(token_ids: Iterable[int]) -> torch.Tensor:
    words = [0, 0]
    for token_id in token_ids:
        words[token_id // 32] |= 1 << token_id % 32
    return torch.tensor(words, dtype=torch.int32)


def row(bitmask: torch.Tensor | None, **params: Any) -> SamplingRow:
    return SamplingRow(SamplingParams(temperature=0, **params), 3, bitmask=bitmask)


def test_a_row_that_can_choose_nothing_is_alone_with_that() -> None:
    logits = torch.linspace(0, 1, 5 * 40).reshape(5, 40)
    logits[1, 7] = torch.nan
    logits[2, :30] = -torch.inf
    rows = [row(bits({3, 9})), row(bits({5})), row(bits({7})), row(bits({})), row(None)]
    before = logits.clone()
    chosen = [None if found is None else found.token_id for found in sample(logits, rows)]
    # The second row's NaN is where nothing is allowed; what gives one has failed all the same.
    assert chosen == [9, None, None, None, 39]
    assert torch.equal(logits.nan_to_num(5), before.nan_to_num(5))


def test_log_probabilities_are_of_what_the_model_gave() -> None:
    logits = torch.linspace(0, 1, 40)[None]
    (found,) = sample(logits, [row(bits({3}), top_logprobs=1)])
    assert found is not None
    assert found.token_id == 3
    assert found.logprobs is not None
    expected = logits.log_softmax(-1)[0]
    assert found.logprobs.chosen == pytest.approx(expected[3].item())
    ((token_id, logprob),) = found.logprobs.top
    assert token_id == 39
    assert logprob == pytest.approx(expected[39].item())


def test_rows_without_a_grammar_are_not_adjusted() -> None:
    assert not row(None).is_adjusted
    assert row(bits({1})).is_adjusted


def test_the_token_that_ends_a_grammar_is_no_text_where_special_tokens_have_names() -> None:
    # "a" may stand again and again, so only the end of the text ends this grammar.
    grammar = LLMatcher.grammar_from_lark("start: /a+/")
    params = SamplingParams(
        temperature=0.0,
        logit_bias=((EOS_TOKEN_ID, 100.0),),
        max_tokens=5,
        ignore_eos=True,
        skip_special_tokens=False,
        grammar=grammar,
    )
    collector = run_staggered(make_engine(load(llama)), [SequenceRequest("s", PROMPT, params)])
    assert (collector.text("s"), collector.finish_reason("s")) == ("a", FinishReason.STOP)
