"""A replica that sleeps lightly, with the shipped model: its layers are worth giving back."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from mmap import PAGESIZE
from pathlib import Path

import pytest
from ray import serve

from deployments.compute.speedups import StoredWeights
from deployments.contract.errors import RaystreamError
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine_thread import EngineDeadError
from deployments.generator.prompt_encoder import EncodedPrompt
from deployments.plan.replica_report import ReplicaState, SleepState
from deployments.replica import model_replica
from deployments.text_generator import TextGenerator
from serve_app.backends.replicas.replica_errors import ParkedError
from tests.deadline import until
from tests.deployments.local_handle import local_backend, read
from tests.deployments.sleepy import Device, Sleepy
from tests.deployments.tiny_folder import spec
from tests.failing import failing

MODEL = Path(__file__).parents[2] / "models/pydoc-chat"
SAMPLED = SamplingParams(temperature=0.8, seed=7, max_tokens=24, ignore_eos=True)
QUESTION = (ChatMessage("user", (TextPart("What does os.path.join do?"),)),)

HELD_S = 1.0
"""Longer than all else that a request of these tests waits for before its first token."""

pytestmark = pytest.mark.in_time


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path_factory.mktemp("models") / "pydoc-chat"))


class Replica(Sleepy, TextGenerator):
    """A replica of these tests' model."""

    def __init__(self, folder: Path) -> None:
        entry = {"dtype": "auto", "max_model_len": 512, "light_sleep_after_s": 3600}
        super().__init__(spec(folder, **entry), end_process=self._note_end)

    @serve.batch
    async def _encode(
        self, requests: list[GenerationRequest]
    ) -> list[EncodedPrompt | RaystreamError]:
        """Encode requests: by a queue of its own, since a class's stays with one event loop."""
        return self._encoder.encode(requests)


# Replicas end while there is an event loop: their sockets are closed there.
@pytest.fixture(scope="module")
async def shared(folder: Path) -> AsyncIterator[Replica]:
    made = Replica(folder)
    yield made
    made.__del__()


@pytest.fixture
async def own(folder: Path) -> AsyncIterator[Replica]:
    made = Replica(folder)
    yield made
    made.__del__()


def request(name: str = "r") -> GenerationRequest:
    return GenerationRequest(name, QUESTION, SAMPLED)


async def test_answers_are_the_same_before_and_after(shared: Replica) -> None:
    before = await read(shared, request())
    for number in (1, 2):
        await shared.fall_asleep()
        report = (await shared.inspect()).light_sleep
        assert report is not None
        assert report.state is SleepState.ASLEEP
        assert report.num_sleeps >= number
        assert report.level == 2
        engine = shared._engine._placed.engine
        assert isinstance(engine._weights, StoredWeights)
        inner = [each.content[PAGESIZE:-PAGESIZE] for each in engine._weights._weights]
        assert inner
        assert not any(map(any, inner))
        after = await read(shared, request())
        assert "".join(d.text for d in after) == "".join(d.text for d in before)
        assert [i for d in after for i in d.token_ids] == [i for d in before for i in d.token_ids]
        assert not engine.is_asleep
        assert engine._scheduler.table.retained


async def test_prefixes_are_forgotten(shared: Replica) -> None:
    await read(shared, request())
    known = await read(shared, request())
    await shared.fall_asleep()
    forgotten = await read(shared, request())
    assert any(delta.num_cached_tokens for delta in known)
    assert not any(delta.num_cached_tokens for delta in forgotten)


async def test_many_wait_for_one_wake_and_one_of_them_may_leave(shared: Replica) -> None:
    (expected,) = {"".join(d.text for d in await read(shared, request()))}
    await shared.fall_asleep()
    backend = local_backend(shared)
    async with aclosing(backend):
        leaving = asyncio.ensure_future(backend.send(request("leaves")))
        staying = [asyncio.ensure_future(read(shared, request(f"r{i}"))) for i in range(3)]
        await until(lambda: shared._sleeper.state is not SleepState.ASLEEP)
        leaving.cancel()
        await asyncio.wait([leaving])
        texts = ["".join(d.text for d in deltas) for deltas in await asyncio.gather(*staying)]
    assert texts == [expected] * 3
    await until(lambda: not shared._sleeper._users)
    assert not shared._admission.num_running


async def test_times_of_a_request_begin_before_it_wakes_the_model(
    shared: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("time_to_first_token", "e2e_request_latency", "request_queue_time")
    may_wake, wake = asyncio.Event(), shared._engine.wake

    async def sums() -> list[float]:
        series = (await shared.read_metrics()).series
        found = (series[f"vllm_{name}_seconds"] for name in names)
        return [each[0][1][-1] if each else 0.0 for each in found]

    async def wake_later() -> None:
        await may_wake.wait()
        await wake()

    await shared.fall_asleep()
    monkeypatch.setattr(shared._engine, "wake", wake_later)
    before, began_s = await sums(), time.monotonic()
    reading = asyncio.ensure_future(read(shared, request()))
    await until(lambda: shared._sleeper.state is SleepState.WAKING)
    waking_s = time.monotonic()
    await until(lambda: time.monotonic() - waking_s >= HELD_S)
    may_wake.set()
    await reading
    gained = [late - early for late, early in zip(await sums(), before, strict=True)]
    assert all(HELD_S <= each <= time.monotonic() - began_s for each in gained)


async def test_probes_find_it_healthy_and_leave_it_asleep(shared: Replica) -> None:
    await shared.fall_asleep()
    await shared.check_health()
    await shared.ping()
    report = await shared.inspect()
    assert report.state is ReplicaState.HEALTHY
    assert shared._sleeper.state is SleepState.ASLEEP
    assert shared._engine._placed.engine.is_asleep
    metrics = (await shared.read_metrics()).series
    assert metrics["raystream_replica_asleep"] == ((("tiny",), (1,)),)


async def test_an_operator_wakes_it_and_a_pin_keeps_it_awake(
    shared: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shared.fall_asleep()
    await shared.wake()
    assert shared._sleeper.state is SleepState.AWAKE
    assert not shared._engine._placed.engine.is_asleep
    monkeypatch.setattr(shared._sleeper, "_is_kept_awake", pinned)
    shared._sleeper._look()
    await until(lambda: shared._sleeper._change is None)
    assert shared._sleeper.state is SleepState.AWAKE


async def pinned() -> bool:
    return True


async def test_a_stream_is_parked_when_its_turn_is_over_and_its_rest_is_the_same(
    device: Device, own: Replica
) -> None:
    long = replace(request(), sampling=replace(SAMPLED, max_tokens=400), may_park=True)
    expected = [i for d in await read(own, long) for i in d.token_ids]
    token_ids: list[int] = []
    backend = local_backend(own)
    async with aclosing(backend):
        async with aclosing(await backend.send(long)) as stream:
            token_ids += [i for delta in await anext(aiter(stream)) for i in delta.token_ids]
            device.holder = "other"
            with suppress(ParkedError):
                async for deltas in stream:
                    token_ids += [i for delta in deltas for i in delta.token_ids]
        assert 0 < len(token_ids) < len(expected), "it was parked"
        await until(lambda: own._sleeper.state is SleepState.ASLEEP)
        assert device.other.try_take(), "the other model may load now"
        assert own._engine._placed.engine.is_asleep
        assert (await own.record_autoscaling_stats())["awake"] == 0
        rest = replace(long, generated_token_ids=tuple(token_ids), is_resumed=True)
        going_on = asyncio.create_task(read(own, rest))
        await until(lambda: own._sleeper._users)
        device.holder = "tiny"
        await until(lambda: device.turn._is_mine)
        assert own._sleeper.state is SleepState.ASLEEP, "the other model still holds memory"
        device.other.free()
        token_ids += [i for d in await going_on for i in d.token_ids]
    assert token_ids == expected
    assert (await own.record_autoscaling_stats())["awake"] == 1
    assert not device.other.try_take()


async def test_a_replica_that_starts_in_the_turn_of_another_model_sleeps_then(
    device: Device, folder: Path
) -> None:
    device.holder = "other"
    made = Replica(folder)
    await until(lambda: made._sleeper.state is SleepState.ASLEEP)
    assert device.other.try_take()
    made.__del__()


async def test_a_pinned_model_that_nobody_asks_wakes_in_its_turn(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def is_pinned() -> bool:
        return True

    monkeypatch.setattr(model_replica, "is_pinned", is_pinned)
    device.holder = "other"
    made = Replica(folder)
    await until(lambda: made._sleeper.state is SleepState.ASLEEP)
    await until(lambda: made._sleeper._change is None)
    device.holder = "tiny"
    await made.check_health()
    await until(lambda: made._sleeper.state is SleepState.AWAKE)
    made.__del__()


async def test_a_replica_that_is_stopped_while_another_model_holds_memory_loads_nothing(
    device: Device, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device.other.try_take()
    monkeypatch.setattr(model_replica, "is_stopped", lambda: True)
    monkeypatch.setattr(Replica, "_open_engine", failing(AssertionError("it loads")))
    with pytest.raises(RuntimeError, match="before it could load"):
        await asyncio.to_thread(Replica, folder)


async def test_it_ends_at_once_while_it_sleeps(own: Replica) -> None:
    await own.fall_asleep()
    own.__del__()
    assert not own._engine.is_alive
    with pytest.raises(RaystreamError):
        await own._engine.wake()


async def test_it_stays_awake_if_its_weights_can_not_be_written(
    own: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError("the disk is full")))
    before = await read(own, request())
    await own.look()
    assert own._sleeper.state is SleepState.AWAKE
    assert "can't be written: the disk is full" in caplog.text
    after = await read(own, request())
    assert [i for d in after for i in d.token_ids] == [i for d in before for i in d.token_ids]


async def test_a_replica_that_can_not_wake_says_why_and_is_replaced(own: Replica) -> None:
    await own.fall_asleep()
    weights = own._engine._placed.engine._weights
    assert isinstance(weights, StoredWeights)
    assert weights._file is not None
    os.ftruncate(weights._file.fileno(), 0)
    requests = [read(own, request(f"r{i}")) for i in range(3)]
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert {str(each) for each in results} == {
        "The model could not be woken: the file of the weights has ended too early"
    }
    await until(lambda: not own._engine.is_alive)
    with pytest.raises(EngineDeadError):
        await own.check_health()
    assert own.ends == 1
