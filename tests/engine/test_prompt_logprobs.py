"""Log-probabilities of prompts are the stock model's, however the engine comes to compute them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from deployments.contract.output import FinishReason, TokenLogprobs
from deployments.contract.sampling_params import (
    MAX_NUM_PROMPT_LOGPROBS,
    InvalidParameterError,
    SamplingParams,
)
from deployments.engine import engine as engine_module
from deployments.engine.detokenizing import token_bytes
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.collector import GREEDY, Collector, image_request, random_prompt, run_staggered
from tests.engine.faults import FaultyModel, no_fault, out_of_memory_above
from tests.engine.tiny_models import (
    MODELS,
    VOCAB_SIZE,
    gemma3,
    generate,
    load,
    make_engine,
    mistral,
    qwen2,
)

MakeModel = Callable[[], PreTrainedModel]
Prompt = tuple[int, ...]

SCORED = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3)
ONLY_SCORED = replace(SCORED, max_tokens=0)


@cache
def stock_logprobs(make_model: MakeModel, prompt: Prompt) -> torch.Tensor:
    """Return the stock model's log-probabilities after each token: [length, vocab]."""
    model = make_model().train(mode=False)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt])).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits.double().log_softmax(dim=-1)


def reported(collector: Collector, name: str) -> list[tuple[TokenLogprobs, int]]:
    """Return what a sequence's deltas say about its prompt, in the order in which they came."""
    parts = [part for delta in collector.deltas[name] for part in delta.prompt_logprobs]
    return [position for part in parts for position in part.positions()]


def assert_those_of_the_stock_model(
    make_model: MakeModel, prompt: Prompt, found: list[tuple[TokenLogprobs, int]], num_top: int = 3
) -> None:
    logprobs = stock_logprobs(make_model, prompt)
    assert [position.chosen.token_id for position, _ in found] == list(prompt[1:])
    for row, (position, rank), own in zip(logprobs, found, prompt[1:], strict=False):
        assert position.chosen.logprob == pytest.approx(row[own].item(), abs=1e-3)
        assert rank == 1 + (row > row[own]).sum().item()
        likeliest = row.topk(num_top)
        assert [top.token_id for top in position.top] == likeliest.indices.tolist()
        assert [top.logprob for top in position.top] == pytest.approx(
            likeliest.values.tolist(), abs=1e-3
        )


def alone(make_model: MakeModel, prompt: Prompt, params: SamplingParams = SCORED) -> Collector:
    engine = make_engine(load(make_model), budget=96)
    return run_staggered(engine, [SequenceRequest("s", prompt, params)])


@pytest.mark.parametrize("budget", [3, 5, 24, 96])
def test_they_are_the_stock_models_whatever_the_chunks(budget: int) -> None:
    prompt = random_prompt(Random(1), 40)
    engine = make_engine(load(qwen2), budget=budget)
    collector = run_staggered(engine, [SequenceRequest("s", prompt, SCORED)])
    assert_those_of_the_stock_model(qwen2, prompt, reported(collector, "s"))
    assert collector.token_ids("s") == generate(qwen2, prompt, 4)


@pytest.mark.slow
@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_they_are_the_stock_models_in_company(make_model: MakeModel) -> None:
    random = Random(2)
    prompts = {f"s{i}": random_prompt(random, 1 + 9 * i) for i in range(5)}
    others = [SequenceRequest(f"o{i}", random_prompt(random, 4 + 7 * i), GREEDY) for i in range(5)]
    requests = [SequenceRequest(name, prompt, SCORED) for name, prompt in prompts.items()]
    both = [each for pair in zip(requests, others, strict=True) for each in pair]
    collector = run_staggered(make_engine(load(make_model), budget=10), both)
    for name, prompt in prompts.items():
        assert_those_of_the_stock_model(make_model, prompt, reported(collector, name))
    for other in others:
        expected = generate(make_model, other.prompt_token_ids, 12)
        assert collector.token_ids(other.sequence_id) == expected


def test_a_prompt_that_lies_in_the_cache_is_computed_all_the_same_and_feeds_the_cache() -> None:
    prompt = random_prompt(Random(3), 40)
    engine = make_engine(load(qwen2))
    for name, params in (("first", GREEDY), ("scored", SCORED), ("last", GREEDY)):
        collector = run_staggered(engine, [SequenceRequest(name, prompt, params)])
        num_cached = sum(delta.num_cached_tokens for delta in collector.deltas[name])
        if name == "scored":
            assert num_cached == 0
            assert_those_of_the_stock_model(qwen2, prompt, reported(collector, name))
        elif name == "last":
            assert num_cached == len(prompt) - 1
    engine = make_engine(load(qwen2))
    run_staggered(engine, [SequenceRequest("scored", prompt, ONLY_SCORED)])
    after = run_staggered(engine, [SequenceRequest("s", prompt, GREEDY)])
    assert after.deltas["s"][0].num_cached_tokens == len(prompt) - 1


def test_a_sequence_does_not_wait_for_a_prefix_that_it_may_not_use() -> None:
    prompt = random_prompt(Random(4), 60)
    engine = make_engine(load(qwen2), budget=24)
    engine.add(SequenceRequest("first", prompt, GREEDY))
    engine.add(SequenceRequest("scored", prompt, SCORED))
    for _ in range(3):
        engine.step()
    assert engine.stats.num_running == 2


@pytest.mark.parametrize("most_tokens", [1, 3])
def test_a_step_that_runs_out_of_memory_reports_nothing_twice(most_tokens: int) -> None:
    prompt, loaded = random_prompt(Random(5), 50), load(mistral)
    model = FaultyModel(loaded, no_fault)
    collector = Collector(make_engine(loaded))
    collector.engine.add(SequenceRequest("s", prompt, SCORED))
    collector.engine.add(SequenceRequest("o", random_prompt(Random(6), 9), SCORED))
    collector.step()
    model.fault = out_of_memory_above(most_tokens)
    collector.run()
    assert_those_of_the_stock_model(mistral, prompt, reported(collector, "s"))


def test_a_preempted_sequence_reports_each_token_once() -> None:
    random = Random(7)
    engine = make_engine(load(qwen2), max_num_seqs=8, max_model_len=64, budget=8, memory=1)
    collector = Collector(engine)
    unknown = replace(SCORED, max_tokens=None)
    prompts = {f"s{i}": random_prompt(random, 12) for i in range(8)}
    for name, prompt in prompts.items():
        engine.add(SequenceRequest(name, prompt, unknown))
    collector.run()
    assert engine.stats.num_preempted > 0
    for name, prompt in prompts.items():
        assert_those_of_the_stock_model(qwen2, prompt, reported(collector, name))


def test_a_sequence_preempted_within_its_prompt_goes_on_where_it_was() -> None:
    prompt = random_prompt(Random(8), 50)
    collector = Collector(make_engine(load(qwen2), budget=10))
    collector.engine.add(SequenceRequest("s", prompt, SCORED))
    for _ in range(2):
        collector.step()
    (sequence,) = collector.engine._scheduler.running
    assert 0 < sequence.num_scored_tokens < len(prompt)
    collector.engine._preempt(sequence)
    collector.run()
    assert_those_of_the_stock_model(qwen2, prompt, reported(collector, "s"))


SCORED_PROMPTS = st.lists(st.integers(44, VOCAB_SIZE - 1), min_size=1, max_size=40).map(tuple)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    prompts=st.lists(SCORED_PROMPTS, min_size=1, max_size=4),
    num_top=st.integers(0, 5),
    budget=st.integers(3, 30),
    rows=st.integers(1, 12),
    data=st.data(),
)
def test_any_parts_of_any_prompts_are_those_of_the_prompt_alone(
    prompts: list[Prompt], num_top: int, budget: int, rows: int, data: st.DataObject
) -> None:
    loaded, params = load(qwen2), replace(ONLY_SCORED, prompt_logprobs=num_top)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_module, "MAX_SCORED_LOGITS", rows * VOCAB_SIZE)
        engine = make_engine(loaded, budget=budget)
    num_known = [data.draw(st.integers(0, len(prompt))) for prompt in prompts]
    together = run_staggered(
        engine,
        [
            SequenceRequest(f"s{i}", prompt, params, num_prompt_logprobs=num_known[i])
            for i, prompt in enumerate(prompts)
        ],
    )
    for i, prompt in enumerate(prompts):
        parts = [p for delta in together.deltas[f"s{i}"] for p in delta.prompt_logprobs]
        assert sum(map(len, parts)) == len(prompt) - num_known[i]
        assert all(len(part) <= rows + 1 for part in parts)
        expected = reported(alone(qwen2, prompt, params), "s")
        assert reported(together, f"s{i}") == expected[max(0, num_known[i] - 1) :]
        first = [part.first for part in parts if part.first is not None]
        assert [token_id for token_id, _ in first] == ([] if num_known[i] else [prompt[0]])


def due_rows(engine: Engine) -> Iterator[tuple[int, int]]:
    """Run an engine to its end; yield how many rows each step has, and how many give logits."""
    seen: list[tuple[int, int]] = []
    compute = engine._runner._compute

    def counted(*arguments: torch.Tensor) -> torch.Tensor:
        seen.append((arguments[0].shape[-1], len(arguments[2])))
        return compute(*arguments)  # type: ignore[arg-type] # the last one is a packed step

    engine._runner._compute = counted  # type: ignore[method-assign,assignment] # as above
    while engine.has_work:
        engine.step()
    yield from seen


def test_a_step_computes_logits_of_few_rows_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_SCORED_LOGITS", 7 * VOCAB_SIZE)
    engine = make_engine(load(qwen2), budget=24)
    for i in range(3):
        engine.add(SequenceRequest(f"s{i}", random_prompt(Random(i), 30), ONLY_SCORED))
    assert all(num_due <= 7 + 3 for _, num_due in due_rows(engine))


def test_other_sequences_of_a_step_compute_no_more_logits_and_no_smaller_chunks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "MAX_SCORED_LOGITS", 2 * VOCAB_SIZE)
    engine = make_engine(load(qwen2), budget=24)
    engine.add(SequenceRequest("o", random_prompt(Random(1), 40), replace(GREEDY, max_tokens=2)))
    assert [due for _, due in due_rows(engine)] == [0, 1, 1]
    engine.add(SequenceRequest("s", random_prompt(Random(2), 8), ONLY_SCORED))
    engine.add(SequenceRequest("o", random_prompt(Random(3), 60), replace(GREEDY, max_tokens=1)))
    rows = [num_rows for num_rows, _ in due_rows(engine)]
    assert rows[:2] == [24, 24]


def num_steps_to_first_token(engine: Engine, name: str) -> int:
    collector = Collector(engine)
    num_steps = 0
    while name not in collector.deltas:
        collector.step()
        engine.check()
        num_steps += 1
    return num_steps


@pytest.mark.parametrize("params", [GREEDY, SCORED])
def test_a_sequence_does_not_wait_behind_those_whose_rows_are_scored(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_SCORED_LOGITS", 2 * VOCAB_SIZE)
    engine = make_engine(load(qwen2), budget=96)
    for i in range(2):
        engine.add(SequenceRequest(f"s{i}", random_prompt(Random(i), 60), params))
    engine.add(SequenceRequest("o", random_prompt(Random(2), 20), GREEDY))
    assert num_steps_to_first_token(engine, "o") <= 2


@pytest.mark.parametrize("params", [GREEDY, SCORED])
def test_a_sequence_does_not_wait_for_a_prefix_whose_rows_are_scored(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "MAX_SCORED_LOGITS", 2 * VOCAB_SIZE)
    prompt = random_prompt(Random(4), 60)
    engine = make_engine(load(qwen2), budget=96)
    engine.add(SequenceRequest("s", prompt, params))
    engine.add(SequenceRequest("o", (*prompt, 50), GREEDY))
    assert num_steps_to_first_token(engine, "o") == 2 - (params is SCORED)


def test_sequences_whose_rows_are_scored_keep_their_place_in_the_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_module, "MAX_SCORED_LOGITS", 2 * VOCAB_SIZE)
    engine = make_engine(load(qwen2), budget=96, max_num_seqs=3)
    for i in range(3):
        engine.add(SequenceRequest(f"s{i}", random_prompt(Random(i), 10), ONLY_SCORED))
        engine.add(SequenceRequest(f"o{i}", random_prompt(Random(9 + i), 10), GREEDY))
    engine.step()
    assert [s.sequence_id for s in engine._scheduler.running] == ["s0", "o0", "o1"]
    assert [s.sequence_id for s in engine._scheduler.waiting] == ["s1", "s2", "o2"]
    while "s0" in {s.sequence_id for s in engine._scheduler.running}:
        engine.step()
        engine.check()
    engine.step()
    assert engine._scheduler.running[-1].sequence_id == "s1"


def test_with_max_tokens_0_a_sequence_ends_after_its_prompt() -> None:
    prompt = random_prompt(Random(9), 30)
    collector = alone(qwen2, prompt, ONLY_SCORED)
    assert collector.token_ids("s") == []
    assert collector.text("s") == ""
    assert collector.finish_reason("s") is FinishReason.LENGTH
    assert_those_of_the_stock_model(qwen2, prompt, reported(collector, "s"))
    plain = alone(qwen2, prompt, SamplingParams(temperature=0, max_tokens=0))
    assert [delta.finish_reason for delta in plain.deltas["s"]] == [FinishReason.LENGTH]
    assert plain.deltas["s"][0].begun_s is not None


def test_logits_that_are_not_finite_end_only_their_sequence() -> None:
    loaded = load(qwen2)
    with torch.no_grad():
        loaded.model.get_parameter("model.embed_tokens.weight")[40] = torch.nan
    prompt = random_prompt(Random(10), 20)
    requests = [
        SequenceRequest("bad", (*prompt[:5], 40, *prompt[5:]), SCORED),
        SequenceRequest("good", prompt, SCORED),
    ]
    collector = run_staggered(make_engine(loaded), requests)
    assert collector.deltas["bad"][-1].error == "the model failed on this sequence"
    assert_those_of_the_stock_model(qwen2, prompt, reported(collector, "good"))


def test_a_part_holds_so_few_log_probabilities_that_it_is_soon_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompt = random_prompt(Random(12), 40)
    expected = reported(alone(qwen2, prompt), "s")
    monkeypatch.setattr(token_bytes, "MAX_PART_ENTRIES", 30)
    collector = alone(qwen2, prompt)
    first = collector.deltas["s"][0]
    assert [len(part) for part in first.prompt_logprobs] == [8, 7, 7, 7, 7, 4]
    assert [part.first is None for part in first.prompt_logprobs] == [False, *[True] * 5]
    assert reported(collector, "s") == expected


def test_a_prompt_with_images_is_refused_by_name() -> None:
    engine = make_engine(load(gemma3))
    with pytest.raises(InvalidParameterError, match="images") as caught:
        engine.add(image_request("s", Random(1), 1, SCORED))
    assert caught.value.param == "prompt_logprobs"


def test_more_log_probabilities_than_an_answer_can_hold_are_refused() -> None:
    limits = EngineLimits(1, MAX_NUM_PROMPT_LOGPROBS, 24)
    prompt = (50,) * (MAX_NUM_PROMPT_LOGPROBS // 4)
    limits.check(SequenceRequest("s", prompt, SCORED), VOCAB_SIZE)
    with pytest.raises(InvalidParameterError, match="at most 131072 are reported") as caught:
        limits.check(SequenceRequest("s", (*prompt, 50), SCORED), VOCAB_SIZE)
    assert caught.value.param == "prompt_logprobs"


def test_only_the_first_of_several_answers_brings_the_prompts_log_probabilities() -> None:
    assert [SCORED.of_choice(index).prompt_logprobs for index in range(3)] == [3, None, None]
