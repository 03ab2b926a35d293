"""Sampling parameters in the engine: over steps, after resumption, and against oracles."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import InvalidParameterError, SamplingParams, uniform
from deployments.engine.engine import Engine
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine import reference_sampler as reference
from tests.engine.collector import (
    Collector,
    penalized_requests,
    random_prompt,
    run_one,
    run_staggered,
    sampled_requests,
)
from tests.engine.tiny_models import (
    EOS_TOKEN_ID,
    VOCAB_SIZE,
    byte_tokenizer,
    llama,
    load,
    make_engine,
    qwen2,
)

PROMPT = (60, 61, 62)
ALL_TOKEN_IDS = frozenset(range(VOCAB_SIZE))


def stock_tokens(prompt: Sequence[int], max_tokens: int, **options: Any) -> list[int]:
    """Return what the stock model generates greedily with transformers' own processors."""
    input_ids = torch.tensor([list(prompt)])
    output = llama().train(mode=False).generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        **options,
    )  # fmt: skip
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


def llama_tokens(prompt: Sequence[int], params: SamplingParams) -> list[int]:
    collector = run_staggered(
        make_engine(load(llama)), [SequenceRequest("s", tuple(prompt), params)]
    )
    return collector.token_ids("s")


@pytest.mark.parametrize("repetition_penalty", [0.7, 1.3, 5.0])
def test_the_repetition_penalty_matches_transformers(repetition_penalty: float) -> None:
    prompt = random_prompt(Random(1), 30)
    params = SamplingParams(temperature=0, max_tokens=40, repetition_penalty=repetition_penalty)
    stock = stock_tokens(prompt, 40, repetition_penalty=repetition_penalty)
    assert llama_tokens(prompt, params) == stock
    assert stock != stock_tokens(prompt, 40)


def test_a_bias_matches_transformers() -> None:
    prompt, bias = random_prompt(Random(2), 9), {70: 4.0, 71: 3.5, 72: -9.0}
    params = SamplingParams(temperature=0, max_tokens=20, logit_bias=tuple(bias.items()))
    stock = stock_tokens(prompt, 20, sequence_bias={(i,): value for i, value in bias.items()})
    assert llama_tokens(prompt, params) == stock
    assert stock != stock_tokens(prompt, 20)


@pytest.mark.slow
def test_every_token_is_what_a_plain_reference_samples_from_the_stock_models_logits() -> None:
    given = [*sampled_requests(Random(33)), *penalized_requests(Random(34))]
    given = [SequenceRequest(f"n{i}", r.prompt_token_ids, r.params) for i, r in enumerate(given)]
    collector = run_staggered(make_engine(load(qwen2)), given)
    stock = qwen2().train(mode=False)
    for request in given:
        prompt, params = request.prompt_token_ids, request.params
        output = collector.token_ids(request.sequence_id)
        with torch.inference_mode():
            logits = stock(input_ids=torch.tensor([[*prompt, *output]])).logits[0]
        for place, token_id in enumerate(output):
            position = len(prompt) + place
            barred = (EOS_TOKEN_ID,) if place < params.min_tokens else ()
            values = reference.adjusted(
                logits[position - 1].tolist(), params, prompt, output[:place], barred
            )
            likely = reference.probabilities(values, params)
            assert token_id == reference.choose(likely, uniform(params.seed, position))


@pytest.mark.slow
def test_penalized_tokens_are_the_same_alone_and_in_a_batch() -> None:
    loaded, requests = load(qwen2), penalized_requests(Random(31))
    together = run_staggered(make_engine(loaded, max_num_seqs=2), requests)
    for request in requests:
        alone = run_staggered(make_engine(loaded), [request])
        name = request.sequence_id
        assert together.deltas[name] == alone.deltas[name]


@pytest.mark.slow
@pytest.mark.parametrize("num_generated", [1, 5, 8])
def test_a_resumed_sequence_is_penalized_and_stopped_as_if_uninterrupted(
    num_generated: int,
) -> None:
    loaded = load(qwen2)
    for request in penalized_requests(Random(32)):
        name = request.sequence_id
        whole = run_staggered(make_engine(loaded), [request])
        if len(whole.deltas[name]) <= num_generated:
            continue
        resumed = run_staggered(
            make_engine(loaded),
            [
                SequenceRequest(
                    name,
                    request.prompt_token_ids,
                    request.params,
                    tuple(whole.token_ids(name)[:num_generated]),
                )
            ],
        )
        assert resumed.deltas[name] == whole.deltas[name][num_generated:]


def test_min_tokens_bars_the_end_and_then_allows_it() -> None:
    wish = ((EOS_TOKEN_ID, 100.0),)
    for min_tokens in (0, 1, 7):
        params = SamplingParams(min_tokens=min_tokens, max_tokens=20, logit_bias=wish)
        collector = run_one(params)
        assert len(collector.token_ids("s")) == min_tokens + 1
        assert collector.token_ids("s").index(EOS_TOKEN_ID) == min_tokens
        assert collector.finish_reason("s") is FinishReason.STOP


def test_a_stop_string_within_min_tokens_is_ordinary_text() -> None:
    whole = run_one(SamplingParams(temperature=0, max_tokens=12)).text("s")
    stop = whole[4:6]
    params = SamplingParams(temperature=0, max_tokens=12, min_tokens=12, stop=(stop,))
    assert run_one(params).text("s") == whole


def neighbours(engine: Engine, bad: SequenceRequest) -> Collector:
    good = [SequenceRequest(f"g{i}", (50 + i, 60), SamplingParams(max_tokens=9)) for i in range(3)]
    return run_staggered(engine, [good[0], bad, *good[1:]])


def test_only_a_sequence_that_may_choose_no_token_ends_with_an_error() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=ALL_TOKEN_IDS, top_logprobs=3)
    collector = neighbours(make_engine(load(qwen2)), SequenceRequest("bad", PROMPT, params))
    assert collector.finish_reason("bad") is FinishReason.ERROR
    assert "no token can be chosen" in (collector.deltas["bad"][-1].error or "")
    harmless = SequenceRequest("bad", PROMPT, SamplingParams(max_tokens=1))
    clean = neighbours(make_engine(load(qwen2)), harmless)
    for name in ("g0", "g1", "g2"):
        assert collector.token_ids(name) == clean.token_ids(name)


@pytest.mark.parametrize(
    ("param", "params"),
    [
        ("logit_bias", SamplingParams(logit_bias=((5, 1.0), (VOCAB_SIZE, 1.0)))),
        ("stop_token_ids", SamplingParams(stop_token_ids=frozenset({2**70}))),
    ],
)
def test_a_token_id_outside_the_vocabulary_is_refused_before_admission(
    param: str, params: SamplingParams
) -> None:
    engine = make_engine(load(qwen2))
    with pytest.raises(InvalidParameterError, match="from 0 to 299") as caught:
        engine.add(SequenceRequest("s", PROMPT, params))
    assert caught.value.param == param
    assert not engine.has_work


def test_min_tokens_works_with_an_eos_id_outside_the_vocabulary() -> None:
    model = load(qwen2)
    loaded = type(model)(model.model, model.tokenizer, None, frozenset({EOS_TOKEN_ID, 9999}))
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=3)
    collector = run_staggered(make_engine(loaded), [SequenceRequest("s", PROMPT, params)])
    assert collector.finish_reason("s") is FinishReason.LENGTH


def test_every_token_has_its_logprobs_and_bytes_even_if_text_is_held_back() -> None:
    params = SamplingParams(
        temperature=1, seed=3, max_tokens=40, top_logprobs=4, stop=("\x00\x01",)
    )
    collector = run_one(params)
    for delta in collector.deltas["s"]:
        assert [entry.chosen.token_id for entry in delta.logprobs] == list(delta.token_ids)
    entries = [entry for delta in collector.deltas["s"] for entry in delta.logprobs]
    special = set(byte_tokenizer().all_special_ids)
    text = b"".join(t.chosen.token_bytes for t in entries if t.chosen.token_id not in special)
    assert text.decode(errors="replace") == collector.text("s")


def test_logprobs_are_those_of_the_stock_model() -> None:
    params = SamplingParams(temperature=1.5, seed=3, max_tokens=12, top_logprobs=5, top_k=9)
    collector = run_one(params)
    token_ids = [*PROMPT, *collector.token_ids("s")]
    with torch.inference_mode():
        logits = qwen2().train(mode=False)(input_ids=torch.tensor([token_ids])).logits[0]
    expected = logits.log_softmax(-1)
    for position, delta in enumerate(collector.deltas["s"], start=len(PROMPT)):
        [entry] = delta.logprobs
        row = expected[position - 1]
        assert entry.chosen.logprob == pytest.approx(float(row[token_ids[position]]), abs=1e-4)
        assert [t.logprob for t in entry.top] == pytest.approx(
            row.topk(5).values.tolist(), abs=1e-4
        )
