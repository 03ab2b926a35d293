import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
from transformers import Qwen2ForCausalLM
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter

from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.generation import GenerationRequest
from deployments.contract.output import EngineStats, FinishReason, SequenceJournal
from deployments.contract.sampling_params import InvalidParameterError, SamplingParams
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.engine.limits import SequenceTooLongError
from deployments.engine.scheduling.sequence import Beginning, SequenceRequest
from deployments.generator.admission import engine_run
from deployments.generator.admission.admission import Admission, AdmissionLimits
from deployments.generator.admission.engine_run import EngineRun
from deployments.plan import cgroup
from deployments.plan.replica_report import SleepState
from deployments.plan.sleep_memory import VLLM_HOST_PART
from deployments.replica.light_sleep import LightSleeper
from deployments.vllm_engine import sleep as sleep_module
from deployments.vllm_engine.step_figures import StepLogger
from tests.engine.tiny_models import EOS_TOKEN_ID, byte_tokenizer, qwen2
from tests.vllm_engine.parameter_sets import (
    EVERY,
    GRAMMAR,
    PARAMETER_SETS,
    PROMPT,
    RANDOM,
    tiny_model_folder,
)
from tests.vllm_engine.running_engine import DEADLINE_S, Gains, RunningEngine, started

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

NUM_TOKENS = 40
CUTS = (0, 1, 7, 37)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
COMPILING_S = 1.0
"""CPU time that compiling exceeds, even with all files of an earlier time: it was 2.1 s. A short
answer takes a tenth of a second."""

STEP_TOKENS = 16
"""The most tokens in one step, so that a long prompt takes several."""

BLOCK_TOKENS = 128
"""Tokens of a block of keys and values in vLLM's CPU build."""


@pytest.fixture(scope="module")
def running() -> Iterator[RunningEngine]:
    with started(max_batched_tokens=STEP_TOKENS) as engine:
        yield engine


async def test_greedy_tokens_are_those_of_transformers(running: RunningEngine) -> None:
    model: Any = Qwen2ForCausalLM.from_pretrained(tiny_model_folder(), dtype=torch.float32)
    expected = model.generate(
        torch.tensor([PROMPT]),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=NUM_TOKENS,
        do_sample=False,
    )[0, len(PROMPT) :].tolist()
    gains = await running.run(replace(EVERY, max_tokens=NUM_TOKENS, stop_token_ids=frozenset()))
    assert gains.token_ids == tuple(expected)
    assert gains.reason is FinishReason.LENGTH


async def test_sequences_that_are_cut_anywhere_go_on_as_if_they_had_not_been(
    running: RunningEngine,
) -> None:
    sets = {
        name: replace(params, max_tokens=NUM_TOKENS)
        for name, params in {**PARAMETER_SETS, "stop": replace(RANDOM, stop=("~",))}.items()
    }
    whole = dict(zip(sets, await asyncio.gather(*map(running.run, sets.values())), strict=True))
    cuts = [(name, cut) for name in sets for cut in CUTS if cut < len(whole[name].token_ids)]
    resumed = await asyncio.gather(
        *(running.run(sets[name], whole[name].token_ids[:cut]) for name, cut in cuts)
    )
    assert len(cuts) > 35
    differing = [
        (name, cut)
        for (name, cut), gains in zip(cuts, resumed, strict=True)
        if gains.token_ids != whole[name].token_ids[cut:] or gains.reason != whole[name].reason
    ]
    assert not differing


async def test_each_step_is_told_once_after_its_deltas(running: RunningEngine) -> None:
    running.seen.clear()
    await asyncio.gather(*(running.run(EVERY) for _ in range(4)))
    await running.until_idle()
    told = [each.num_steps for each in running.seen]
    assert EVERY.max_tokens is not None
    assert len(told) >= EVERY.max_tokens
    assert told == list(range(told[0], told[0] + len(told)))


def test_vllm_keeps_no_metrics_beside_those_of_the_replica(running: RunningEngine) -> None:
    manager = running.engine._llm.logger_manager
    assert manager is not None
    (logger,) = manager.stat_loggers
    assert isinstance(logger, PerEngineStatLoggerAdapter)
    assert [type(each) for each in logger.per_engine_stat_loggers.values()] == [StepLogger]


async def test_a_stop_string_ends_the_text_and_the_sequence(running: RunningEngine) -> None:
    whole = await running.run(EVERY)
    stop = whole.text[6:8]
    gains = await running.run(replace(EVERY, stop=(stop,)))
    assert gains.text == whole.text[: whole.text.index(stop)]
    assert (gains.reason, gains.last.stop) == (FinishReason.STOP, stop)
    await running.until_idle()


async def test_an_end_of_sequence_token_is_delivered_and_adds_no_text(
    running: RunningEngine,
) -> None:
    params = replace(EVERY, ignore_eos=False, logit_bias=((EOS_TOKEN_ID, 100.0),))
    gains = await running.run(params)
    assert (gains.token_ids, gains.text) == ((EOS_TOKEN_ID,), "")
    assert gains.reason is FinishReason.STOP


async def test_log_probabilities_come_with_their_tokens_and_do_not_stop_the_engine(
    running: RunningEngine,
) -> None:
    before_s = cpu_s(engine_core())
    gains = await running.run(replace(EVERY, top_logprobs=3))
    assert cpu_s(engine_core()) - before_s < COMPILING_S
    entries = [entry for delta in gains.deltas for entry in delta.logprobs]
    assert [entry.chosen.token_id for entry in entries] == list(gains.token_ids)
    for entry in entries:
        assert entry.top[0] == entry.chosen  # it is greedy
        assert [each.logprob for each in entry.top] == sorted(
            (each.logprob for each in entry.top), reverse=True
        )
        assert len(entry.top) == 3


async def test_a_prompt_s_log_probabilities_are_told_once_and_before_the_answer(
    running: RunningEngine,
) -> None:
    params = replace(EVERY, prompt_logprobs=2)
    gains = await running.run(params)
    parts = [part for delta in gains.deltas for part in delta.prompt_logprobs]
    assert sum(map(len, parts)) == len(PROMPT)
    assert gains.deltas[0].prompt_logprobs
    positions = [each for part in parts for each in part.positions()]
    assert [entry.chosen.token_id for entry, _ in positions] == list(PROMPT[1:])
    moved = await running.run(params, gains.token_ids[:5], num_prompt_logprobs=3)
    rest = [part for delta in moved.deltas for part in delta.prompt_logprobs]
    assert [each for part in rest for each in part.positions()] == positions[2:]


async def test_without_tokens_to_generate_only_the_prompt_is_computed(
    running: RunningEngine,
) -> None:
    gains = await running.run(SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert (gains.token_ids, gains.text) == ((), "")
    assert gains.reason is FinishReason.LENGTH
    assert gains.last.begun_s is not None


async def test_a_prefix_is_cached_and_counted(running: RunningEngine) -> None:
    prompt = tuple(range(50, 200))
    first = await running.run(EVERY, prompt_token_ids=prompt)
    before = running.engine.stats.num_cached_tokens
    second = await running.run(EVERY, prompt_token_ids=prompt)
    assert second.token_ids == first.token_ids
    told = [each.deltas[0].num_cached_tokens for each in (first, second)]
    assert told == [0, BLOCK_TOKENS]
    assert running.engine.stats.num_cached_tokens == before + BLOCK_TOKENS


async def test_a_beginning_is_noted_while_the_prompt_is_still_computed(
    running: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(range(20, 20 + 8 * STEP_TOKENS))
    first, second, gains = Beginning(), Beginning(), Gains()
    noted: list[tuple[int | None, int]] = []

    def note(stats: EngineStats) -> None:
        noted.append((first.num_cached_tokens, len(gains.deltas)))

    monkeypatch.setattr(running.engine, "_on_stats", note)
    with running.running(gains, EVERY, prompt_token_ids=prompt, beginning=first):
        await gains.ended.wait()
    assert noted.count((0, 0)) > 4, "steps that have told it before the first delta"
    await running.run(EVERY, prompt_token_ids=(*prompt, 20), beginning=second)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(prompt))


async def test_what_a_sequence_computed_before_it_left_and_came_again_is_not_told_as_cached(
    running: RunningEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, gains = tuple(range(30, 30 + 12 * STEP_TOKENS)), Gains()
    run = EngineRun(
        running.engine,
        GenerationRequest("r", "", EVERY),
        SequenceRequest(running.engine.unique_id("r"), prompt, EVERY),
        gains.take,
        flush=lambda: None,
        on_begun=lambda: None,
        on_late=lambda: None,
    )
    num_steps, has_left = 0, False

    def leave_once(stats: EngineStats) -> None:
        nonlocal num_steps, has_left
        num_steps += run.has_begun
        if num_steps == BLOCK_TOKENS // STEP_TOKENS and not has_left:
            assert not gains.deltas
            has_left = True
            run.leave()
            run.enter(goes_first=False)

    monkeypatch.setattr(running.engine, "_on_stats", leave_once)
    num_cached_before = running.engine.stats.num_cached_tokens
    async with asyncio.timeout(DEADLINE_S):
        with closing(run):
            run.enter(goes_first=False)
            await gains.ended.wait()
    assert running.engine.stats.num_cached_tokens - num_cached_before == BLOCK_TOKENS
    assert [delta.num_cached_tokens for delta in gains.deltas if delta.num_cached_tokens] == []
    assert len(gains.token_ids) == EVERY.max_tokens


async def test_a_journal_says_when_a_sequence_began(running: RunningEngine) -> None:
    journal, began_ns = SequenceJournal(), time.time_ns()
    await running.run(EVERY, journal=journal)
    assert journal.begun_ns is not None
    assert began_ns - 1e7 <= journal.begun_ns <= time.time_ns()
    assert not journal.preempted_ns


async def test_a_block_that_ends_early_aborts_its_sequence(running: RunningEngine) -> None:
    gains = Gains()
    with running.running(gains, ENDLESS):
        await gains.begun.wait()
    num_deltas = len(gains.deltas)
    await running.until_idle()
    assert len(gains.deltas) == num_deltas


async def test_a_block_that_ends_at_once_leaves_nothing_behind(running: RunningEngine) -> None:
    with running.running(Gains(), ENDLESS):
        pass
    await running.engine.ping()
    await running.until_idle()
    assert not running.engine._llm.output_processor.request_states


async def test_a_grammar_binds_the_text_and_goes_on_after_a_move(running: RunningEngine) -> None:
    params = replace(RANDOM, grammar=GRAMMAR, max_tokens=NUM_TOKENS)
    whole = await running.run(params)
    assert json.loads(whole.text).keys() == {"a", "b"}
    assert whole.reason is FinishReason.STOP
    for cut in (1, 7):
        moved = await running.run(params, whole.token_ids[:cut])
        assert moved.token_ids == whole.token_ids[cut:]


@pytest.mark.parametrize("park_after_s", [60, 0], ids=["displaced", "parked"])
@pytest.mark.parametrize("grammar", [None, GRAMMAR], ids=["free", "bound"])
async def test_a_sequence_that_makes_room_for_a_better_one_goes_on_as_if_it_had_not(
    running: RunningEngine,
    monkeypatch: pytest.MonkeyPatch,
    park_after_s: float,
    grammar: str | None,
) -> None:
    monkeypatch.setattr(engine_run, "PARK_AFTER_S", park_after_s)
    params = replace(RANDOM, grammar=grammar, presence_penalty=0.5, max_tokens=NUM_TOKENS)
    whole = await running.run(params)
    entered = mock.Mock(side_effect=running.engine.running)
    monkeypatch.setattr(running.engine, "running", entered)
    admission = Admission(AdmissionLimits(1, 8, None), running.facts.layout)
    low, high, rest = Gains(), Gains(), Gains()
    with ExitStack() as of_high:
        num_before, counts = 0, (0, 0)

        def let_high_come(stats: EngineStats) -> None:
            nonlocal num_before, counts
            if low.deltas and not num_before:
                num_before = len(low.token_ids)
                of_high.enter_context(running.admitted(admission, high, params, priority=0))
                counts = (admission.num_running, admission.num_waiting)

        # vLLM computes ahead of a late event loop; a step's call still comes before the next one.
        monkeypatch.setattr(running.engine, "_on_stats", let_high_come)
        async with asyncio.timeout(DEADLINE_S):
            with running.admitted(admission, low, params, priority=1):
                await high.ended.wait()
                assert counts == (1, 1)
                of_high.close()
                await low.ended.wait()
            if park_after_s == 0:
                assert low.reason is FinishReason.PARKED
                with running.admitted(admission, rest, params, priority=1, given=low.token_ids):
                    await rest.ended.wait()
    again = entered.call_args_list[2].args[0]  # after the low one and the better one
    assert again.generated_token_ids == whole.token_ids[:num_before] != ()
    assert high.token_ids == low.token_ids + rest.token_ids == whole.token_ids
    assert high.text == low.text + rest.text == whole.text
    assert (rest if park_after_s == 0 else low).reason is whole.reason


async def test_a_grammar_that_can_not_be_used_is_refused_by_name(running: RunningEngine) -> None:
    with pytest.raises(InvalidParameterError):
        await running.run(replace(EVERY, grammar="no grammar"))


async def test_a_sequence_that_does_not_fit_is_refused(running: RunningEngine) -> None:
    with pytest.raises(SequenceTooLongError):
        await running.run(SamplingParams(max_tokens=256))


async def test_one_that_fails_to_take_its_deltas_ends_no_other(running: RunningEngine) -> None:
    class Failing(Gains):
        def take(self, delta: object) -> None:
            raise ValueError("a bug")

    beside = asyncio.ensure_future(running.run(EVERY))
    with running.running(Failing(), ENDLESS):
        assert len((await beside).token_ids) == EVERY.max_tokens
    await running.until_idle()


async def test_an_idle_engine_is_healthy_by_a_ping(running: RunningEngine) -> None:
    await running.until_idle()
    await running.engine.check_health()
    num_steps = running.engine.stats.num_steps
    await running.engine.check_health()
    assert running.engine.stats.num_steps > num_steps


def cpu_s(process: psutil.Process) -> float:
    """Return the seconds for which a process and its children, also former ones, have computed."""
    family = (process, *process.children(recursive=True))
    return float(sum(sum(each.cpu_times()[:4]) for each in family))


def engine_core() -> psutil.Process:
    """Return the process of the engine that started last."""
    children = psutil.Process().children()
    return max(
        (each for each in children if "resource_tracker" not in " ".join(each.cmdline())),
        key=lambda each: each.create_time(),
    )


async def test_an_engine_that_sleeps_is_healthy_and_computes_nothing_until_it_wakes(
    running: RunningEngine,
) -> None:
    engine, prompt = running.engine, tuple(range(60, 210))
    before = await running.run(RANDOM, prompt_token_ids=prompt)
    known = await running.run(RANDOM, prompt_token_ids=prompt)
    assert known.deltas[0].num_cached_tokens >= BLOCK_TOKENS
    for _ in range(2):
        await running.until_idle()
        assert await engine.sleep()
        assert await engine._llm.is_sleeping()
        num_steps = engine.stats.num_steps
        for _ in range(2):
            await engine.check_health()
            await engine.ping()
        assert engine.stats.num_steps == num_steps
        assert await engine._llm.is_sleeping()
        assert engine.is_alive
        await engine.wake()
        after = await running.run(RANDOM, prompt_token_ids=prompt)
        assert (after.token_ids, after.text) == (before.token_ids, before.text)
        assert not any(delta.num_cached_tokens for delta in after.deltas), "prefixes are dropped"
    await engine.check_health()


async def test_an_engine_with_a_sequence_does_not_sleep(running: RunningEngine) -> None:
    gains = Gains()
    with running.running(gains, replace(EVERY, max_tokens=100)):
        assert not await running.engine.sleep()
        await asyncio.wait_for(gains.ended.wait(), DEADLINE_S)
    assert gains.reason is FinishReason.LENGTH


async def test_an_engine_whose_host_has_no_room_for_the_weights_stays_awake(
    running: RunningEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await running.until_idle()
    needed_bytes = int(VLLM_HOST_PART * running.facts.memory.weight_bytes)
    monkeypatch.setattr(running.engine._sleep, "_has_slept", False)
    monkeypatch.setattr(cgroup, "available_bytes", lambda: needed_bytes - 1)
    assert not await running.engine.sleep()
    assert "stays awake: its weights may take" in caplog.text
    await running.run(EVERY)
    monkeypatch.setattr(cgroup, "available_bytes", lambda: needed_bytes)
    assert await running.engine.sleep()
    # vLLM keeps the memory that it has once pinned.
    await running.engine.wake()
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 0)
    assert await running.engine.sleep()
    await running.engine.wake()


async def test_a_replica_s_sleeper_puts_an_engine_to_sleep_and_wakes_it_for_a_sequence(
    running: RunningEngine,
) -> None:
    async def is_kept_awake() -> bool:
        return False

    before = await running.run(RANDOM)
    await running.until_idle()
    sleeper = LightSleeper(
        running.engine, lambda: 0.01, lambda: 1, lambda report: None, is_kept_awake
    )
    sleeper.watch()
    async with asyncio.timeout(DEADLINE_S):
        while sleeper.state is not SleepState.ASLEEP:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        with sleeper.in_use() as use:
            await sleeper.awake(use)
            after = await running.run(RANDOM)
        sleeper.close()
    assert after.token_ids == before.token_ids


async def never(*_: object) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("method", ["sleep", "wake_up"])
@pytest.mark.parametrize("fails", [True, False], ids=["fails", "hangs"])
async def test_an_engine_that_can_not_sleep_or_wake_has_failed_and_says_why(
    running: RunningEngine, monkeypatch: pytest.MonkeyPatch, method: str, *, fails: bool
) -> None:
    engine, wakes = running.engine, method == "wake_up"
    await running.until_idle()
    if wakes:
        assert await engine.sleep()
    with monkeypatch.context() as patch:
        for name in ("failure", "is_awake"):
            patch.setattr(
                engine._sleep, name, getattr(engine._sleep, name)
            )  # what the test leaves is undone
        patch.setattr(sleep_module, "MOST_S", 0.0)
        patch.setattr(sleep_module, "LOOK_S", 0.01)
        error = RuntimeError("CUDA out of memory")
        asked = mock.AsyncMock(side_effect=error if fails else never)
        patch.setattr(engine._llm, method, asked)
        with pytest.raises(ReplicaUnavailableError) as told:
            await (engine.wake() if wakes else engine.sleep())
        why = "CUDA out of memory" if fails else "vLLM does not answer"
        what = "woken" if wakes else "put to sleep"
        assert str(told.value) == f"The model could not be {what}: {why}"
        assert not engine.is_alive
        with pytest.raises(ReplicaUnavailableError, match=why):
            await engine.check_health()
    if wakes:
        await engine.wake()
    await running.run(EVERY)


@pytest.mark.slow
async def test_an_engine_that_is_killed_while_it_sleeps_does_not_wake() -> None:
    with started() as doomed:
        await doomed.run(EVERY)
        await doomed.until_idle()
        assert await doomed.engine.sleep()
        os.kill(engine_core().pid, signal.SIGKILL)
        with pytest.raises(ReplicaUnavailableError):
            async with asyncio.timeout(DEADLINE_S):
                await doomed.engine.wake()
        assert not doomed.engine.is_alive
        with pytest.raises(ReplicaUnavailableError):
            await doomed.engine.check_health()


@pytest.mark.slow
async def test_an_engine_that_stops_ends_its_streams_and_its_health() -> None:
    with started() as doomed:
        await doomed.engine.ping()
        gains = Gains()
        with doomed.running(gains, ENDLESS):
            await gains.begun.wait()
            os.kill(engine_core().pid, signal.SIGSTOP)
            async with asyncio.timeout(DEADLINE_S):
                await gains.ended.wait()
        assert gains.reason is FinishReason.ABORT
        assert "failed" in (gains.last.error or "")
        assert not doomed.engine.is_alive
        with pytest.raises(ReplicaUnavailableError):
            await doomed.engine.check_health()
        os.kill(engine_core().pid, signal.SIGKILL)


@pytest.mark.slow
async def test_streams_of_an_engine_that_is_killed_may_go_on_elsewhere() -> None:
    with started() as doomed:
        many = [Gains() for _ in range(8)]
        tasks = [asyncio.ensure_future(_follow(doomed, gains, ENDLESS)) for gains in many]
        for gains in many:
            await gains.begun.wait()
        os.kill(engine_core().pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*tasks)
        assert {gains.reason for gains in many} == {FinishReason.ABORT}
        with pytest.raises(ReplicaUnavailableError):
            doomed.engine.require_alive()
        with pytest.raises(ReplicaUnavailableError):
            await doomed.engine.check_health()


async def _follow(running: RunningEngine, gains: Gains, params: SamplingParams) -> None:
    with running.running(gains, params):
        await gains.ended.wait()


@pytest.mark.slow
def test_an_engine_that_can_not_start_says_why_in_one_line() -> None:
    with (
        pytest.raises(UnsupportedModelError, match="No available memory for the cache") as caught,
        started(kv_cache_memory_bytes=1000),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_heads_for_which_vllm_has_no_kernel_are_refused_at_the_start(tmp_path: Path) -> None:
    narrow = qwen2()
    assert narrow.config.hidden_size // narrow.config.num_attention_heads == 8
    narrow.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with (
        pytest.raises(UnsupportedModelError, match=r"heads of 8 elements, only for 32, 64, .*GPU$"),
        started(source=str(tmp_path)),
    ):
        pass


def test_arguments_that_vllm_refuses_are_told_in_one_line() -> None:
    with (
        pytest.raises(UnsupportedModelError, match=r"max_model_len.*4096") as caught,
        started(max_model_len=4096),
    ):
        pass
    assert "\n" not in str(caught.value)
