"""Faults inside an engine: which sequences end, which continue unaffected, and what is left."""

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Rows
from math import log2
from random import Random

import pytest
import torch
from transformers import PreTrainedModel

from deployments.compute.token_budget import GOOD_STEPS
from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.grammar.matcher import GrammarMatcher
from deployments.engine.limits import InvalidSequenceError
from deployments.engine.recovery.step_recovery import OUT_OF_MEMORY
from deployments.engine.sampling.device_counts import DeviceCounts
from deployments.engine.sampling.row import SamplingRow
from deployments.engine.sampling.sampler import Sampled, sample
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.collector import (
    GREEDY,
    Collector,
    image_request,
    penalized_requests,
    random_prompt,
    run_staggered,
    sampled_requests,
)
from tests.engine.faults import (
    CLIENTS_TEXT,
    FaultyModel,
    broken_by,
    make_undecodable,
    no_fault,
    out_of_memory_above,
)
from tests.engine.tiny_models import gemma3, generate, load, make_engine, mistral, qwen2

BAD_ID = 40
RECOVERY = "deployments.engine.recovery.sampling_recovery"


def requests(num: int, seed: int = 41) -> list[SequenceRequest]:
    random = Random(seed)
    return [SequenceRequest(f"s{i}", random_prompt(random, 3 + i % 5), GREEDY) for i in range(num)]


def assert_equal(collector: Collector, expected: Collector) -> None:
    for name in expected.deltas:
        assert collector.token_ids(name) == expected.token_ids(name), name
        assert collector.text(name) == expected.text(name), name
        assert collector.finish_reason(name) is expected.finish_reason(name), name


@pytest.mark.slow
def test_one_bad_sequence_among_64_costs_few_passes_and_no_tokens() -> None:
    good = requests(63)
    expected = run_staggered(make_engine(load(qwen2), max_num_seqs=64, budget=1000), good)
    loaded = load(qwen2)
    model = FaultyModel(loaded, broken_by([BAD_ID]))
    collector = Collector(make_engine(loaded, max_num_seqs=64, budget=1000))
    bad = SequenceRequest("bad", (60, BAD_ID), GREEDY)
    for request in (*good[:40], bad, *good[40:]):
        collector.engine.add(request)
    collector.step()
    assert len(model.passes) <= 1 + log2(64) + 2
    assert len(collector.deltas) == 64
    collector.run()
    assert collector.deltas["bad"][0].error == "the model failed on this sequence"
    assert_equal(collector, expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 9, 23])
def test_out_of_memory_delays_sequences_without_an_error(num_tokens: int) -> None:
    given = [*sampled_requests(Random(42)), *requests(5)]
    given = [SequenceRequest(f"n{i}", r.prompt_token_ids, r.params) for i, r in enumerate(given)]
    expected = run_staggered(make_engine(load(qwen2), max_num_seqs=6), given)
    loaded = load(qwen2)
    model = FaultyModel(loaded, out_of_memory_above(num_tokens))
    collector = run_staggered(make_engine(loaded, max_num_seqs=6), given)
    assert max(len(token_ids) for token_ids in model.passes) > num_tokens
    assert_equal(collector, expected)


@pytest.mark.parametrize("make_model", [gemma3, mistral])
def test_out_of_memory_while_all_decode_preempts_and_resumes(
    make_model: Callable[[], PreTrainedModel],
) -> None:
    random = Random(43)
    given = [
        image_request(f"i{i}", random, 1)
        if make_model is gemma3 and i % 2 == 0
        else SequenceRequest(f"t{i}", random_prompt(random, 20), GREEDY)
        for i in range(5)
    ]
    expected = run_staggered(make_engine(load(make_model), max_num_seqs=5), given)
    loaded = load(make_model)
    model = FaultyModel(loaded, no_fault)
    collector = Collector(make_engine(loaded, max_num_seqs=5))
    for request in given:
        collector.engine.add(request)
    while len(collector.deltas) < 5:
        collector.step()
    model.fault = out_of_memory_above(2)
    before = {name: len(deltas) for name, deltas in collector.deltas.items()}
    collector.step()
    assert {name: len(deltas) for name, deltas in collector.deltas.items()} == before
    assert (collector.engine.stats.num_running, collector.engine.stats.num_waiting) == (2, 3)
    assert collector.engine.stats.num_preempted == 3
    collector.engine.check()
    model.fault = no_fault
    collector.run()
    assert_equal(collector, expected)


def test_the_oldest_sequences_continue_while_memory_is_short() -> None:
    loaded = load(qwen2)
    model = FaultyModel(loaded, no_fault)
    collector = Collector(make_engine(loaded, max_num_seqs=4, budget=100))
    for request in requests(4):
        collector.engine.add(request)
    collector.step()
    model.fault = out_of_memory_above(2)
    collector.step()
    collector.step()
    assert {name: len(d) for name, d in collector.deltas.items()} == {
        "s0": 2,
        "s1": 2,
        "s2": 1,
        "s3": 1,
    }


def test_steps_grow_again_when_memory_is_back() -> None:
    loaded = load(qwen2)
    model = FaultyModel(loaded, no_fault)
    engine = make_engine(loaded, max_num_seqs=4)
    endless = SamplingParams(temperature=0, ignore_eos=True)
    for i in range(4):
        engine.add(SequenceRequest(f"s{i}", (60 + i,), endless))
    engine.step()
    model.fault = out_of_memory_above(3)
    engine.step()
    model.fault = no_fault
    assert engine.stats.num_running == 2
    for _ in range(GOOD_STEPS + 2):
        engine.step()
    assert engine.stats.num_running == 4


def test_only_a_sequence_that_lacks_memory_even_alone_ends() -> None:
    random = Random(44)
    given = [
        SequenceRequest("a", random_prompt(random, 5), GREEDY),
        image_request("image", random, 3),
        SequenceRequest("b", random_prompt(random, 30), GREEDY),
    ]
    loaded = load(gemma3)
    FaultyModel(loaded, out_of_memory_above(24))
    collector = run_staggered(make_engine(loaded), given)
    assert "memory" in (collector.deltas["image"][-1].error or "")
    for request in (given[0], given[2]):
        expected = generate(gemma3, request.prompt_token_ids, 12)
        assert collector.token_ids(request.sequence_id) == expected


def test_what_a_failed_pass_wrote_harms_nobody_who_gets_its_memory() -> None:
    loaded = load(qwen2)
    is_bad, is_too_long = broken_by([BAD_ID]), out_of_memory_above(5)
    FaultyModel(loaded, lambda token_ids: is_bad(token_ids) or is_too_long(token_ids))
    engine = make_engine(loaded, max_num_seqs=2)
    long = SequenceRequest("long", random_prompt(Random(47), 20), GREEDY)
    engine.add(SequenceRequest("bad", (60, BAD_ID), GREEDY))
    engine.add(long)
    # The bad one ends, and the long one has nothing computed yet.
    assert [name for name, _ in engine.step()] == ["bad"]
    engine.check()
    collector = run_staggered(engine, [])
    assert collector.token_ids("long") == generate(qwen2, long.prompt_token_ids, 12)


@pytest.mark.parametrize("make_model", [qwen2, mistral])
@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_prefix_written_by_a_failed_decode_step_is_not_shared(
    make_model: Callable[[], PreTrainedModel], is_aborted: bool
) -> None:
    loaded, random = load(make_model), Random(49)
    model = FaultyModel(loaded, no_fault)
    collector = Collector(make_engine(loaded))
    engine, prompt = collector.engine, random_prompt(random, 20)
    engine.add(SequenceRequest("donor", prompt, GREEDY))
    collector.step()
    engine.add(SequenceRequest("neighbour", random_prompt(random, 9), GREEDY))
    model.fault = out_of_memory_above(5)
    collector.step()
    assert len(collector.deltas["donor"]) == 1
    model.fault = no_fault
    # The donor's second token was written, over the fourteenth where the window is seven tokens.
    engine.abort("neighbour")
    if is_aborted:
        engine.abort("donor")
    engine.check()
    engine.add(SequenceRequest("same", prompt, GREEDY))
    collector.run()
    expected = generate(make_model, prompt, 12)
    assert collector.token_ids("same") == expected
    assert is_aborted or collector.token_ids("donor") == expected


def test_a_sequence_that_has_run_again_after_a_failed_step_shares_its_prefix_again() -> None:
    loaded, prompt = load(qwen2), random_prompt(Random(51), 20)
    model = FaultyModel(loaded, no_fault)
    collector = Collector(make_engine(loaded))
    engine = collector.engine
    engine.add(SequenceRequest("donor", prompt, GREEDY))
    collector.step()
    engine.add(SequenceRequest("neighbour", random_prompt(Random(52), 9), GREEDY))
    model.fault = out_of_memory_above(5)
    collector.step()
    model.fault = no_fault
    collector.step()
    engine.add(SequenceRequest("same", prompt, GREEDY))
    collector.run()
    assert collector.deltas["same"][0].num_cached_tokens == 19
    assert collector.token_ids("same") == collector.token_ids("donor")


def test_no_memory_at_all_ends_all_with_an_error_and_leaves_nothing() -> None:
    loaded = load(qwen2)
    FaultyModel(loaded, out_of_memory_above(0))
    engine = make_engine(loaded)
    collector = run_staggered(engine, requests(5))
    for i in range(5):
        assert collector.finish_reason(f"s{i}") is FinishReason.ERROR
    assert engine.stats.num_steps == 0


def test_an_undecodable_id_ends_only_its_sequence(caplog: pytest.LogCaptureFixture) -> None:
    given = requests(6)
    expected = run_staggered(make_engine(load(qwen2)), given)
    third = expected.token_ids("s2")[3]
    victims = {r.sequence_id for r in given if third in expected.token_ids(r.sequence_id)}
    loaded = load(qwen2)
    make_undecodable(loaded, [third])
    with caplog.at_level(logging.DEBUG):
        collector = run_staggered(make_engine(loaded), given)
    for name in expected.deltas:
        whole = expected.token_ids(name)
        if name in victims:
            assert collector.token_ids(name) == whole[: whole.index(third)]
            assert (
                collector.deltas[name][-1].error
                == "the tokens of this sequence can't be decoded to text"
            )
        else:
            assert collector.token_ids(name) == whole
    assert victims < expected.deltas.keys()
    assert "OverflowError" in caplog.text
    assert CLIENTS_TEXT not in caplog.text


def test_undecodable_generated_ids_are_refused() -> None:
    loaded = load(qwen2)
    make_undecodable(loaded, [77])
    engine = make_engine(loaded)
    with pytest.raises(InvalidSequenceError, match="decoded to text"):
        engine.add(SequenceRequest("s", (60,), GREEDY, (77,)))
    assert not engine.has_work
    engine.check()


class FaultySampling:
    """Stands in for `sample`; fails on rows with the bad seed, and on too many rows.

    It fails after sampling, which is when a failure leaves the most behind.
    """

    BAD_SEED = 13

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_rows: int) -> None:
        self.max_rows = max_rows
        monkeypatch.setattr(f"{RECOVERY}.sample", self)

    def __call__(
        self, logits: torch.Tensor, rows: Rows[SamplingRow], counts: DeviceCounts | None
    ) -> list[Sampled | None]:
        sampled = sample(logits, rows, counts)
        if len(rows) > self.max_rows:
            raise torch.OutOfMemoryError
        if any(row.params.seed == self.BAD_SEED for row in rows):
            raise RuntimeError("probability tensor contains either inf, nan or element < 0")
        return sampled


@pytest.mark.slow
@pytest.mark.parametrize("max_rows", [99, 2, 1])
def test_a_sampler_error_ends_only_its_sequence_and_each_token_comes_once(
    monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    given = [*sampled_requests(Random(45)), *penalized_requests(Random(48)), *requests(3)]
    given = [SequenceRequest(f"n{i}", r.prompt_token_ids, r.params) for i, r in enumerate(given)]
    expected = run_staggered(make_engine(load(qwen2), max_num_seqs=9), given)
    FaultySampling(monkeypatch, max_rows)
    bad = SequenceRequest("bad", (60,), SamplingParams(seed=FaultySampling.BAD_SEED))
    collector = run_staggered(
        make_engine(load(qwen2), max_num_seqs=9), [*given[:5], bad, *given[5:]]
    )
    assert collector.deltas["bad"][0].error == "the next token could not be sampled"
    assert_equal(collector, expected)


class BrokenMatcher(GrammarMatcher):
    """Raises when asked for its bitmask."""

    def __init__(self) -> None:
        self.error = None

    def bitmask(self, barred_token_ids: Collection[int] = ()) -> torch.Tensor:
        raise OverflowError("out of range integral type conversion attempted")


def test_a_grammar_that_raises_ends_only_its_sequence() -> None:
    given = sampled_requests(Random(50))
    expected = run_staggered(make_engine(load(qwen2)), given)
    bad = SequenceRequest("bad", (60,), SamplingParams(), matcher=BrokenMatcher())
    collector = run_staggered(make_engine(load(qwen2)), [*given[:2], bad, *given[2:]])
    assert collector.deltas["bad"][0].error == "the next token could not be sampled"
    assert_equal(collector, expected)


def test_sampling_without_any_memory_ends_each_sequence_once_it_runs_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FaultySampling(monkeypatch, max_rows=0)
    released: list[torch.device] = []
    monkeypatch.setattr(f"{RECOVERY}.release_cache", released.append)
    engine = make_engine(load(qwen2))
    collector = run_staggered(engine, requests(4))
    assert len(released) >= 4
    for i in range(4):
        assert collector.finish_reason(f"s{i}") is FinishReason.ERROR
        assert collector.deltas[f"s{i}"][0].error == OUT_OF_MEMORY
    assert engine.stats.num_steps == 0


@pytest.mark.slow
def test_one_of_two_sequences_that_sampling_has_no_memory_for_waits_for_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = [SequenceRequest(f"s{i}", (60 + i,), SamplingParams(seed=i)) for i in range(2)]
    expected = run_staggered(make_engine(load(qwen2)), given)
    engine = make_engine(load(qwen2))

    def sample_while_there_is_memory(
        logits: torch.Tensor, rows: Rows[SamplingRow], counts: DeviceCounts | None
    ) -> list[Sampled | None]:
        if engine.stats.num_running > 1 and any(row.params.seed == 1 for row in rows):
            raise torch.OutOfMemoryError
        return sample(logits, rows, counts)

    monkeypatch.setattr(f"{RECOVERY}.sample", sample_while_there_is_memory)
    assert_equal(run_staggered(engine, given), expected)


def test_sampling_that_briefly_lacks_memory_ends_no_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = run_staggered(make_engine(load(qwen2), max_num_seqs=5), requests(5))
    collector = Collector(make_engine(load(qwen2), max_num_seqs=5, budget=100))
    for request in requests(5):
        collector.engine.add(request)
    collector.step()
    sampling = FaultySampling(monkeypatch, max_rows=0)
    collector.step()
    collector.engine.check()
    assert collector.engine.stats.num_running == 0
    assert collector.engine._budget.tokens == 2
    sampling.max_rows = 99
    collector.run()
    assert_equal(collector, expected)


def test_a_step_that_yields_no_tokens_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    FaultySampling(monkeypatch, max_rows=9)
    engine = make_engine(load(qwen2))
    run_staggered(
        engine, [SequenceRequest("bad", (60,), SamplingParams(seed=FaultySampling.BAD_SEED))]
    )
    assert engine.stats.num_steps == 0


def test_a_warm_up_that_fails_is_a_load_error() -> None:
    loaded = load(qwen2)
    FaultyModel(loaded, broken_by(range(300)))
    with pytest.raises(UnsupportedModelError, match="warm up"):
        make_engine(loaded).warm_up()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_warm_up_that_runs_out_of_memory_says_so(max_tokens: int) -> None:
    loaded = load(qwen2)
    FaultyModel(loaded, out_of_memory_above(max_tokens))
    with pytest.raises(torch.OutOfMemoryError):
        make_engine(loaded).warm_up()


def test_a_warm_up_with_undecodable_tokens_is_a_load_error() -> None:
    loaded = load(qwen2)
    make_undecodable(loaded, range(300))
    with pytest.raises(UnsupportedModelError, match="decoded to text"):
        make_engine(loaded).warm_up()


def test_a_bug_in_the_bookkeeping_is_raised_and_fails_no_sequence() -> None:
    engine = make_engine(load(qwen2))
    engine.add(requests(1)[0])
    engine.step()
    engine._detokenizers.close("s0")
    with pytest.raises(KeyError):
        engine.step()
