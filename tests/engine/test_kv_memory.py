"""The engine with little KV memory: extents grow, move and make room, and no token changes."""

import logging
import time
from collections.abc import Callable
from random import Random

import pytest
from transformers import PreTrainedModel

from deployments.contract.output import SequenceJournal
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.collector import Collector, random_prompt
from tests.engine.layouts import for_each_layout
from tests.engine.tiny_models import gemma3_text, generate, load, make_engine, qwen2

pytestmark = pytest.mark.slow

MakeModel = Callable[[], PreTrainedModel]

LENGTH = 48
UNKNOWN = SamplingParams(temperature=0)


@for_each_layout
def test_sequences_of_unknown_length_share_the_memory_of_two_and_equal_generate(
    make_model: MakeModel,
) -> None:
    random = Random(17)
    engine = make_engine(load(make_model), max_num_seqs=6, max_model_len=LENGTH, memory=2)
    collector = Collector(engine)
    prompts = {f"s{i}": random_prompt(random, 3 + 2 * i) for i in range(6)}
    for name, prompt in prompts.items():
        engine.add(SequenceRequest(name, prompt, UNKNOWN))
        collector.step()
        engine.check()
    while engine.has_work:
        collector.step()
        engine.check()
    for name, prompt in prompts.items():
        expected = generate(make_model, prompt, LENGTH - len(prompt))
        assert collector.token_ids(name) == expected, name


def test_the_oldest_is_never_preempted_and_all_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = make_engine(load(qwen2), max_num_seqs=8, max_model_len=LENGTH, memory=1)
    collector, random = Collector(engine), Random(3)
    for i in range(8):
        engine.add(SequenceRequest(f"s{i}", random_prompt(random, 4), UNKNOWN))
    while engine.has_work:
        oldest = min((*engine._scheduler.running, *engine._scheduler.waiting), key=lambda s: s.turn)
        before = oldest.num_computed_tokens
        collector.step()
        assert oldest.finish_reason is not None or oldest.num_computed_tokens > before
    assert engine.stats.num_preempted == caplog.text.count("is preempted") > 0


def test_a_journal_says_when_its_sequence_began_and_was_preempted() -> None:
    engine = make_engine(load(qwen2), max_num_seqs=8, max_model_len=LENGTH, memory=1)
    random = Random(3)
    journals = [SequenceJournal() for _ in range(8)]
    before_ns = time.time_ns()
    for i, journal in enumerate(journals):
        prompt = random_prompt(random, 4)
        engine.add(SequenceRequest(f"s{i}", prompt, UNKNOWN, journal=journal))
    assert all(journal.begun_ns is None for journal in journals)
    while engine.has_work:
        engine.step()
    assert journals[0].preempted_ns == []
    preempted = [journal for journal in journals if journal.preempted_ns]
    assert preempted
    for journal in journals:
        assert journal.begun_ns is not None
        times = [before_ns, journal.begun_ns, *journal.preempted_ns, time.time_ns()]
        assert times == sorted(times)


def test_a_journal_keeps_when_a_sequence_began_that_has_left_and_returned() -> None:
    engine = make_engine(load(qwen2), max_num_seqs=1, max_model_len=LENGTH, memory=1)
    journal = SequenceJournal()
    begun_ns = set()
    for name in ("stay", "return"):
        engine.add(SequenceRequest(name, (1, 2, 3), UNKNOWN, journal=journal))
        engine.step()
        begun_ns.add(journal.begun_ns)
        engine.abort(name)
    assert len(begun_ns) == 1
    assert None not in begun_ns


def test_short_answers_leave_room_for_more_sequences_than_full_lengths_would() -> None:
    engine = make_engine(load(qwen2), max_num_seqs=12, max_model_len=96, budget=96, memory=2)
    collector = Collector(engine)
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    for i in range(12):
        engine.add(SequenceRequest(f"s{i}", random_prompt(Random(i), 4), short))
    collector.step()
    assert engine.stats.num_running == 12
    assert engine.stats.kv_usage == 0.5


def test_a_full_engine_keeps_its_system_prompt() -> None:
    engine = make_engine(load(qwen2), max_num_seqs=2, max_model_len=96, memory=4)
    collector, random = Collector(engine), Random(5)
    system = random_prompt(random, 32)
    answer = SamplingParams(temperature=0, max_tokens=4)
    for i in range(12):
        engine.add(SequenceRequest(f"s{i}", (*system, *random_prompt(random, 20)), answer))
    for name in ["other 1", "other 2"]:
        engine.add(SequenceRequest(name, random_prompt(random, 60), answer))
    engine.add(SequenceRequest("last", (*system, *random_prompt(random, 20)), answer))
    collector.run()
    assert collector.deltas["last"][0].num_cached_tokens >= 32


def test_a_prefix_that_has_left_the_window_is_computed_once_more_and_then_shared() -> None:
    engine = make_engine(load(gemma3_text), max_num_seqs=1, max_model_len=96, memory=6)
    collector, random = Collector(engine), Random(6)
    system = random_prompt(random, 40)
    answer = SamplingParams(temperature=0, max_tokens=8)
    prompts = {f"s{i}": (*system, *random_prompt(random, 20)) for i in range(4)}
    for name, prompt in prompts.items():
        engine.add(SequenceRequest(name, prompt, answer))
        collector.run()
        engine.check()
        assert collector.token_ids(name) == generate(gemma3_text, prompt, 8)
    cached = [collector.deltas[name][0].num_cached_tokens for name in prompts]
    assert cached == [0, 0, 40, 40]
