"""A grammar in the engine: what it allows, when it ends, and that it affects no other sequence."""

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

from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import (
    InvalidParameterError,
    ReasoningTokens,
    SamplingParams,
)
from deployments.engine.grammar.matcher import GrammarCompiler, unpack
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.sampler import sample
from deployments.engine.scheduling.sequence import SequenceRequest
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
def test_the_text_is_complete_and_valid_whatever_the_other_parameters(
    schema: Any, params: Mapping[str, Any]
) -> None:
    text, reason = run(schema, **params)
    answer = json.loads(text)
    assert answer in ENUM["enum"] if schema is ENUM else set(answer) == {"a", "b"}
    assert reason is FinishReason.STOP


@pytest.mark.parametrize(("min_tokens", "length"), [(0, 2), (4, 4), (60, 5)])
def test_a_text_that_could_continue_ends_with_eos_but_not_before_min_tokens(
    min_tokens: int, length: int
) -> None:
    bias = ((EOS_TOKEN_ID, 100.0),)
    text, reason = run(
        {"type": "integer", "minimum": 10, "maximum": 99999}, logit_bias=bias, min_tokens=min_tokens
    )
    assert (len(text), reason) == (length, FinishReason.STOP)


def test_max_tokens_may_cut_the_text() -> None:
    text, reason = run(OBJECT, max_tokens=4)
    assert (text, reason) == ('{"a"', FinishReason.LENGTH)


def test_a_text_completed_by_its_last_allowed_token_stops_and_is_not_cut() -> None:
    assert run({"const": "ab"}, max_tokens=4) == ('"ab"', FinishReason.STOP)


def test_a_stop_string_ends_the_text_before_the_grammar_does() -> None:
    assert run(OBJECT, stop=("a",)) == ('{"', FinishReason.STOP)


@pytest.mark.slow
def test_only_the_seed_decides_between_the_allowed_texts() -> None:
    texts = {seed: run(OBJECT, seed=seed)[0] for seed in range(4)}
    assert len(set(texts.values())) == 4
    assert texts == {seed: run(OBJECT, seed=seed)[0] for seed in range(4)}


def test_several_answers_to_one_request_each_follow_the_grammar() -> None:
    asked = request(OBJECT)
    choices = [
        replace(asked, sequence_id=str(i), params=asked.params.of_choice(i)) for i in range(3)
    ]
    collector = run_staggered(make_engine(load(llama)), choices)
    assert len({collector.text(str(i)) for i in range(3)}) == 3
    for i in range(3):
        assert set(json.loads(collector.text(str(i)))) == {"a", "b"}


@pytest.mark.slow
def test_rows_with_and_without_a_grammar_do_not_affect_each_other() -> None:
    free = sampled_requests(Random(7))
    bound = [request(OBJECT, f"b{seed}", seed=seed) for seed in range(3)]
    mixed = [each for pair in zip(free, bound, strict=False) for each in pair] + free[3:]
    together = run_staggered(make_engine(load(llama), max_num_seqs=8), mixed)
    for each in mixed:
        name = each.sequence_id
        alone = run_staggered(make_engine(load(llama)), [each])
        assert together.token_ids(name) == alone.token_ids(name)


@pytest.mark.slow
def test_a_resumed_sequence_continues_within_the_grammar() -> None:
    asked = request(OBJECT)
    whole = run_staggered(make_engine(load(llama)), [asked]).token_ids("s")
    for cut in range(1, len(whole)):
        resumed = replace(asked, generated_token_ids=tuple(whole[:cut]))
        rest = run_staggered(make_engine(load(llama)), [resumed]).token_ids("s")
        assert whole[:cut] + rest == whole


def test_preempted_sequences_continue_within_the_grammar() -> None:
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


def test_a_grammar_with_a_dead_end_ends_only_its_sequence_with_an_error() -> None:
    engine = make_engine(load(llama))
    collector = run_staggered(engine, [request(DEAD_END, "dead"), request(OBJECT, "good")])
    last = collector.deltas["dead"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert last.error is not None
    assert "as the request's grammar requires" in last.error
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
def test_a_broken_grammar_is_refused_with_the_name_of_its_field(grammar: str) -> None:
    asked = SequenceRequest("s", PROMPT, SamplingParams(grammar=grammar))
    engine = make_engine(load(llama))
    with pytest.raises(InvalidParameterError) as refused:
        engine.compile_grammar(asked)
    assert refused.value.param == "response_format"
    with pytest.raises(InvalidParameterError):
        engine.add(asked)
    engine.check()


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"enum": []}], ids=str)
def test_a_schema_that_no_text_can_satisfy_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidParameterError):
        make_engine(load(llama)).compile_grammar(request(schema))


def test_generated_tokens_that_violate_the_grammar_are_refused() -> None:
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
    following = allowed(matcher.bitmask(), vocab_size)
    assert ids_of("a")[0] in following
    assert max(following) < min(vocab_size, VOCAB_SIZE)
    # Special tokens are not text; <pad> is an ordinary token here.
    assert not set(following) & set(range(1, 44))


def test_an_unsupported_tokenizer_is_refused_with_the_name_of_the_field() -> None:
    tokenizer: Any = object()
    with pytest.raises(InvalidParameterError, match="tokenizer") as refused:
        GrammarCompiler(tokenizer, VOCAB_SIZE, {EOS_TOKEN_ID}).compile(json_grammar({}))
    assert refused.value.param == "response_format"


def test_tokens_are_barred_unless_the_grammar_allows_only_those() -> None:
    matcher = compiler().compile(json_grammar({"enum": ["a", "b"]}))
    (quote,), (a,), (b,) = ids_of('"'), ids_of("a"), ids_of("b")
    assert allowed(matcher.bitmask({quote})) == [quote]
    assert allowed(matcher.bitmask({quote, a})) == [quote]
    matcher.advance(quote)
    assert allowed(matcher.bitmask({a})) == [b]
    assert allowed(matcher.bitmask({a, b})) == [a, b]
    assert allowed(matcher.bitmask()) == [a, b]


def test_a_failed_matcher_allows_nothing_and_reports_why() -> None:
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


def test_a_row_that_can_choose_nothing_affects_no_other() -> None:
    logits = torch.linspace(0, 1, 5 * 40).reshape(5, 40)
    logits[1, 7] = torch.nan
    logits[2, :30] = -torch.inf
    rows = [row(bits({3, 9})), row(bits({5})), row(bits({7})), row(bits({})), row(None)]
    before = logits.clone()
    chosen = [None if found is None else found.token_id for found in sample(logits, rows)]
    # The second row's NaN is at a token that is not allowed, but a row with a NaN always fails.
    assert chosen == [9, None, None, None, 39]
    assert torch.equal(logits.nan_to_num(5), before.nan_to_num(5))


def test_log_probabilities_ignore_the_grammar() -> None:
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


def test_the_token_that_ends_a_grammar_adds_no_text_even_if_special_tokens_are_shown() -> None:
    # "a" may repeat without end, so only an EOS token ends this grammar.
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


START, END = 5, 6
MARKS = ReasoningTokens(START, END)
BEGUN = ReasoningTokens(START, END, has_begun=True)
COLORS = json_grammar(ENUM)


def test_a_sequence_may_reason_before_its_grammar_or_follow_it_at_once() -> None:
    (quote,) = ids_of('"')
    matcher = compiler().compile(COLORS, reasoning=MARKS)
    assert allowed(matcher.bitmask()) == [START, quote]
    assert allowed(matcher.bitmask({START})) == [quote]
    assert not matcher.advance(START)
    everything = [i for i in range(VOCAB_SIZE) if i != EOS_TOKEN_ID]
    assert allowed(matcher.bitmask()) == everything
    assert allowed(matcher.bitmask({END})) == [i for i in everything if i != END]
    for token_id in (*ids_of("{]"), START, END):
        assert not matcher.advance(token_id)
    assert allowed(matcher.bitmask()) == [quote]
    ends = [matcher.advance(token_id) for token_id in ids_of('"red"')]
    assert ends == [False, False, False, False, True]
    assert matcher.error is None
    at_once = compiler().compile(COLORS, reasoning=MARKS)
    assert [at_once.advance(token_id) for token_id in ids_of('"red"')][-1]


def test_reasoning_that_the_prompt_began_ends_at_its_mark() -> None:
    matcher = compiler().compile(COLORS, reasoning=BEGUN)
    assert EOS_TOKEN_ID not in allowed(matcher.bitmask())
    assert not matcher.advance(END)
    assert allowed(matcher.bitmask()) == ids_of('"')
    assert not matcher.advance(ids_of("x")[0])
    assert matcher.error
    assert allowed(matcher.bitmask()) == []


@pytest.mark.parametrize("marks", [MARKS, BEGUN])
def test_generated_reasoning_is_consumed_before_the_grammar_s_text(marks: ReasoningTokens) -> None:
    generated = [START, *ids_of("Hm"), END, *ids_of('"re')]
    matcher = compiler().compile(COLORS, generated, marks)
    assert allowed(matcher.bitmask()) == ids_of("d")
    with pytest.raises(InvalidParameterError, match="violate"):
        compiler().compile(COLORS, [START, END, *ids_of("x")], marks)


@pytest.mark.parametrize("grammar", [COLORS, None])
@pytest.mark.parametrize("has_begun", [True, False])
def test_reasoning_ends_where_its_budget_does(grammar: str | None, has_begun: bool) -> None:
    marks = ReasoningTokens(START, END, has_begun, max_tokens=2)
    matcher = compiler().compile(grammar, () if has_begun else (START,), marks)
    for token_id in ids_of("Hm"):
        assert token_id in allowed(matcher.bitmask())
        assert not matcher.advance(token_id)
    assert allowed(matcher.bitmask()) == [END]
    assert allowed(matcher.bitmask({END})) == [END]
    assert not matcher.advance(END)
    everything = list(range(VOCAB_SIZE))
    assert allowed(matcher.bitmask()) == (everything if grammar is None else ids_of('"'))
    resumed = compiler().compile(grammar, [*([] if has_begun else [START]), *ids_of("Hm")], marks)
    assert allowed(resumed.bitmask()) == [END]


CHANNEL, BODY, OTHER = 7, 8, 9
ON_CHANNELS = ReasoningTokens(START, END, max_tokens=3, channel=CHANNEL)
EVERYTHING = list(range(VOCAB_SIZE))


def test_on_channels_only_the_channel_s_name_begins_the_reasoning() -> None:
    for name, is_reasoning in ((CHANNEL, True), (OTHER, False)):
        matcher = compiler().compile(None, (), ON_CHANNELS)
        for token_id in (START, name, BODY, *ids_of("Hm.")):
            assert allowed(matcher.bitmask()) == EVERYTHING
            assert not matcher.advance(token_id)
        assert allowed(matcher.bitmask()) == ([END] if is_reasoning else EVERYTHING)


def test_all_messages_of_reasoning_share_its_budget_and_then_none_begins() -> None:
    first = [START, CHANNEL, BODY, *ids_of("H"), END]
    remark = [START, OTHER, BODY, *ids_of("Look here"), END]
    second = [START, CHANNEL, BODY, *ids_of("m.")]
    matcher = compiler().compile(None, (), ON_CHANNELS)
    for token_id in (*first, *remark, *second):
        assert allowed(matcher.bitmask()) == EVERYTHING
        assert not matcher.advance(token_id)
    assert allowed(matcher.bitmask()) == [END]
    matcher.advance(END)
    assert allowed(matcher.bitmask()) == EVERYTHING
    matcher.advance(START)
    without = [i for i in EVERYTHING if i != CHANNEL]
    assert allowed(matcher.bitmask()) == without
    assert allowed(matcher.bitmask({OTHER})) == [i for i in without if i != OTHER]
    resumed = compiler().compile(None, [*first, *remark, *second, END, START], ON_CHANNELS)
    assert allowed(resumed.bitmask()) == without


def test_reasoning_that_has_lost_its_end_stops_at_the_next_channel() -> None:
    answer = [START, OTHER, BODY, *ids_of("Hello")]
    for lost in ([START, CHANNEL, BODY, *ids_of("H")], [START, CHANNEL, END]):
        matcher = compiler().compile(None, [*lost, *answer], ON_CHANNELS)
        assert allowed(matcher.bitmask()) == EVERYTHING


def test_a_text_reasons_no_longer_than_its_budget_without_a_grammar() -> None:
    (letter,) = ids_of("a")
    bias = ((letter, 100.0),)
    marks = ReasoningTokens(START, END, has_begun=True, max_tokens=3)
    params = SamplingParams(max_tokens=8, logit_bias=bias, reasoning=marks)
    (told,) = [
        run_staggered(make_engine(load(llama)), [SequenceRequest("s", PROMPT, params)]).token_ids(
            "s"
        )
    ]
    assert told == [letter] * 3 + [END] + [letter] * 4


def test_a_stop_string_may_end_the_text_inside_the_reasoning() -> None:
    (letter,) = ids_of("a")
    params: dict[str, Any] = {"stop": ("aa",), "logit_bias": ((letter, 100.0),)}
    collector = Collector(make_engine(load(llama)))
    collector.engine.add(request(ENUM, reasoning=BEGUN, **params))
    collector.run()
    assert (collector.text("s"), collector.finish_reason("s")) == ("", FinishReason.STOP)
    assert collector.token_ids("s") == [letter, letter]


@pytest.mark.parametrize("marks", [MARKS, BEGUN])
def test_a_text_that_ends_is_the_grammar_s_behind_its_reasoning(marks: ReasoningTokens) -> None:
    collector = Collector(make_engine(load(llama)))
    for seed in range(12):
        params: dict[str, Any] = {"seed": seed, "reasoning": marks, "ignore_eos": seed % 2 == 0}
        bias = ((START, 3.0), (END, 9.0), (EOS_TOKEN_ID, 9.0))
        collector.engine.add(request(ENUM, f"s{seed}", logit_bias=bias, min_tokens=3, **params))
    collector.run()
    kinds = set()
    for name in collector.deltas:
        told = collector.token_ids(name)
        has_begun = marks.has_begun or told[0] == START
        answer = told[told.index(END) + 1 :] if has_begun else told
        assert collector.finish_reason(name) is FinishReason.STOP
        assert json.loads(str(byte_tokenizer().decode(answer))) in ENUM["enum"]
        kinds.add(has_begun)
    assert True in kinds
