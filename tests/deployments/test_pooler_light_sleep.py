"""A replica that classifies or embeds, and sleeps lightly: its layers are worth giving back."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import pytest
import torch
from ray import serve

from deployments.contract.claims import Claim
from deployments.contract.errors import (
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import Started, Waking
from deployments.contract.model_spec import NO_POOLER_TURNS_ON_GPU
from deployments.contract.pooling import Asleep, Pooled, PoolingRequest
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.replica_report import ReplicaState, SleepState
from deployments.pooling.text_encoder import EncodedTexts
from deployments.replica import model_replica
from deployments.text_pooler import TextPooler
from tests.deadline import DEADLINE_S, until
from tests.deployments.local_handle import local_backend
from tests.deployments.sleepy import Device, Sleepy
from tests.deployments.tiny_folder import spec
from tests.failing import failing
from tests.pooling.tiny_classifiers import roberta
from tests.pooling.tiny_embedders import bert, save_embedder
from tests.pooling.tiny_folder import save_classifier

TASKS = ("classify", "embed")
TEXTS = ("short", "much longer than the other ones " * 3, "", "short")
WIDE = {"hidden_size": 128, "intermediate_size": 512}
"""With these, weights are larger than what stays."""

pytestmark = pytest.mark.in_time


class Replica(Sleepy, TextPooler):
    """A replica of these tests' model."""

    def __init__(self, folder: Path, task: str) -> None:
        made = spec(folder, task=task, light_sleep_after_s=3600)
        super().__init__(made, end_process=self._note_end)

    @serve.batch
    async def _encode(self, requests: list[PoolingRequest]) -> list[EncodedTexts | RaystreamError]:
        """Encode requests: by a queue of its own, since a class's stays with one event loop."""
        return await self._encode_on_thread(requests)

    async def rows(self, *texts: str) -> list[bytes]:
        """Return the numbers that answer texts."""
        found = await self.pool(PoolingRequest("r", texts))
        assert isinstance(found, Pooled)
        return [each.row for each in found.texts]

    @property
    def is_given_back(self) -> bool:
        """Whether the whole pages of the weights are empty."""
        weights = self._device_worker._weights
        pages = [each.content[PAGESIZE:-PAGESIZE] for each in weights._weights]
        assert pages
        return weights.is_given_back and not any(map(any, pages))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    classify, embed = (tmp_path_factory.mktemp(task) for task in TASKS)
    return {
        "classify": save_classifier(classify, roberta(**WIDE)),
        "embed": save_embedder(embed, partial(bert, **WIDE), dense=[(128, 512, torch.nn.Tanh())]),
    }


# Replicas end while there is an event loop: their sockets are closed there.
@pytest.fixture(scope="module", params=TASKS)
async def shared(
    folders: dict[str, Path], request: pytest.FixtureRequest
) -> AsyncIterator[Replica]:
    made = Replica(folders[request.param], request.param)
    yield made
    made.__del__()


@pytest.fixture
async def own(folders: dict[str, Path]) -> AsyncIterator[Replica]:
    made = Replica(folders["classify"], "classify")
    yield made
    made.__del__()


async def test_answers_are_the_same_before_and_after(shared: Replica) -> None:
    before = await shared.rows(*TEXTS)
    for number in (1, 2):
        await shared.fall_asleep()
        assert shared.is_given_back
        report = (await shared.inspect()).light_sleep
        assert report is not None
        assert report.state is SleepState.ASLEEP
        assert report.num_sleeps >= number
        assert (await shared.record_autoscaling_stats())["awake"] == 0
        assert await shared.rows(*TEXTS) == before
        assert not shared.is_given_back
        assert (await shared.record_autoscaling_stats())["awake"] == 1


async def test_many_wait_for_one_wake_and_one_of_them_may_leave(shared: Replica) -> None:
    expected = await shared.rows("a text")
    await shared.fall_asleep()
    leaving = asyncio.ensure_future(shared.rows("leaves"))
    staying = [asyncio.ensure_future(shared.rows("a text")) for _ in range(3)]
    await until(lambda: shared._sleeper.state is not SleepState.ASLEEP)
    leaving.cancel()
    assert await asyncio.gather(*staying) == [expected] * 3
    await asyncio.wait([leaving])
    await until(lambda: not shared._sleeper._users)
    assert (shared._queue.num_waiting, shared._queue.num_running) == (0, 0)


async def test_probes_find_it_healthy_and_leave_it_asleep(shared: Replica) -> None:
    await shared.fall_asleep()
    await shared.check_health()
    await shared.ping()
    report = await shared.inspect()
    assert report.state is ReplicaState.HEALTHY
    assert shared._sleeper.state is SleepState.ASLEEP
    assert shared.is_given_back
    metrics = (await shared.read_metrics()).series
    assert metrics["raystream_replica_asleep"] == ((("tiny",), (1,)),)


async def test_probes_do_not_wait_for_a_change(
    shared: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_wake, wake = asyncio.Event(), shared._worker.wake

    async def wake_later() -> None:
        await may_wake.wait()
        await wake()

    await shared.fall_asleep()
    monkeypatch.setattr(shared._worker, "wake", wake_later)
    asked = asyncio.ensure_future(shared.rows("a text"))
    await until(lambda: shared._sleeper.state is SleepState.WAKING)
    await shared.check_health()
    await shared.ping()
    assert not asked.done()
    may_wake.set()
    await asked


async def test_an_operator_wakes_it(shared: Replica) -> None:
    await shared.fall_asleep()
    await shared.wake()
    assert shared._sleeper.state is SleepState.AWAKE
    assert not shared.is_given_back


async def test_a_suspect_wakes_it_before_its_turn_comes(
    shared: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared._sleeper, "_notice_interval_s", DEADLINE_S)  # one notice at most
    expected = await shared.rows("a text")
    await shared.fall_asleep()
    suspect = PoolingRequest("s", ("a text",), num_deaths=1)
    events = aiter(shared.pool_in_turn(suspect))
    assert [type(each) for each in await anext(events)] == [Waking]
    (started,) = await anext(events)
    assert isinstance(started, Started)
    assert shared._sleeper.state is SleepState.AWAKE
    shared._channels.go_aheads.give(started.number)
    (answer,) = await anext(events)
    assert isinstance(answer, Pooled)
    assert [each.row for each in answer.texts] == expected


async def test_it_ends_at_once_while_it_sleeps(own: Replica) -> None:
    await own.fall_asleep()
    own.__del__()
    assert not own._worker.is_alive
    with pytest.raises(ReplicaUnavailableError):
        await own._worker.wake()


async def test_it_stays_awake_if_its_weights_can_not_be_written(
    own: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError("the disk is full")))
    before = await own.rows(*TEXTS)
    await own.look()
    assert own._sleeper.state is SleepState.AWAKE
    assert "can't be written: the disk is full" in caplog.text
    assert await own.rows(*TEXTS) == before


async def test_a_replica_that_can_not_wake_says_why_and_is_replaced(
    own: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    await own.fall_asleep()
    file = own._device_worker._weights._file
    assert file is not None
    os.ftruncate(file.fileno(), 0)
    results = await asyncio.gather(*[own.rows("a") for _ in range(3)], return_exceptions=True)
    assert {str(each) for each in results} == {
        "The model could not be woken: the file of the weights has ended too early"
    }
    await until(lambda: not own._worker.is_alive)
    with pytest.raises(ReplicaUnavailableError):
        await own.check_health()
    assert own.ends == 1
    assert "can't go on and is replaced: " in caplog.text
    assert "(OSError: the file of the weights has ended too early)" in caplog.text


def test_a_gpu_is_refused(folders: dict[str, Path]) -> None:
    lightly = spec(folders["embed"], task="embed", light_sleep_after_s=1)
    made = TextPooler.__new__(TextPooler)
    made._spec = replace(lightly)
    made._device = type("Gpu", (), {"torch_device": torch.device("cuda")})()
    with pytest.raises(UnsupportedModelError, match="sleeps lightly only on a CPU"):
        made._open_worker()


class Gate:
    """Holds micro-batches back until it is opened."""

    def __init__(self, replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
        self._may_go_on = threading.Event()
        self.has_begun = threading.Event()
        model = replica._placed.pooler.model
        self._stock = model.forward
        monkeypatch.setattr(model, "forward", self._forward)
        self.open = self._may_go_on.set

    def _forward(self, **inputs: Any) -> Any:
        self.has_begun.set()
        assert self._may_go_on.wait(DEADLINE_S)
        return self._stock(**inputs)


async def lose_turn(device: Device, replica: Replica) -> None:
    """Give the turn to another model, which holds memory then."""
    device.holder = "other"
    await until(lambda: replica._sleeper.state is SleepState.ASLEEP)
    assert device.other.try_take(), "the other model may load now"


async def waiting(replica: Replica) -> float:
    """Return what it tells Serve of the requests that wait, as a part of those that may."""
    return (await replica.record_autoscaling_stats())["waiting"]


async def test_what_comes_in_the_turn_of_another_model_waits_for_the_next_and_is_answered_the_same(
    device: Device, own: Replica
) -> None:
    own.reconfigure({"max_queued_requests": 3})
    expected = await own.rows(*TEXTS)
    await lose_turn(device, own)
    assert own.is_given_back
    asked = PoolingRequest("r", TEXTS)
    assert await own.pool(asked) == Asleep(own._replica_id), "it holds up no channel"
    assert await waiting(own) == 0
    backend = local_backend(own)
    async with aclosing(backend):
        asking = [asyncio.ensure_future(backend.send(asked)) for _ in range(4)]
        await until(lambda: own._queue.num_waiting == 4)
        assert await waiting(own) == 1
        assert (await own.inspect()).work.waits.longest_s > 0
        with pytest.raises(OverloadedError, match="4 requests wait"):
            await backend.send(asked)
        leaving = asking.pop()
        leaving.cancel()
        await until(lambda: own._queue.num_waiting == 3)
        device.holder = "tiny"
        await until(lambda: device.turn._is_mine)
        assert own._sleeper.state is SleepState.ASLEEP, "the other model still holds memory"
        device.other.free()
        answers = await asyncio.gather(*asking)
    assert [[each.row for each in answer] for answer in answers] == [expected] * 3
    assert await waiting(own) == 0
    assert not device.other.try_take()
    assert await own.rows(*TEXTS) == expected, "in its turn it answers at once"


async def test_what_makes_room_for_another_key_while_it_waits_is_told_before_its_turn(
    device: Device, own: Replica
) -> None:
    own.reconfigure({"max_queued_requests": 1})
    own._sleeper._notice_interval_s = 0.001
    await lose_turn(device, own)
    asked = PoolingRequest("r", TEXTS)
    backend = local_backend(own)
    async with aclosing(backend):
        first, second = (asyncio.ensure_future(backend.send(asked)) for _ in range(2))
        await until(lambda: own._queue.num_waiting == 2)
        other = asyncio.ensure_future(backend.send(replace(asked, claim=Claim(tenant="other"))))
        with pytest.raises(OverloadedError):
            await second
        assert own._queue.num_waiting == 2
        device.other.free()
        device.holder = "tiny"
        assert len(await first) == len(await other) == len(TEXTS)


async def test_suspects_that_wait_for_each_other_after_their_turn_has_come_take_no_room(
    device: Device, own: Replica
) -> None:
    own.reconfigure({"max_queued_requests": 1})
    own._sleeper._notice_interval_s = DEADLINE_S  # one notice at most
    await lose_turn(device, own)
    suspect = PoolingRequest("s", ("a text",), num_deaths=1)
    first, second = (aiter(own.pool_in_turn(suspect)) for _ in range(2))
    for each in (first, second):
        assert [type(event) for event in await anext(each)] == [Waking]
    assert own._queue.num_waiting == 2, "they wait for the turn"
    device.other.free()
    device.holder = "tiny"
    (started,) = await anext(first)
    waiting_for_first = asyncio.ensure_future(anext(second))
    await until(lambda: own._queue.num_waiting == 0)
    assert len(await own.rows("another text")) == 1
    assert isinstance(started, Started)
    own._channels.go_aheads.give(started.number)
    assert isinstance((await anext(first))[0], Pooled)
    assert isinstance((await waiting_for_first)[0], Started)
    for each in (first, second):
        await each.aclose()  # type: ignore[attr-defined] # a generator


async def test_texts_that_run_when_the_turn_ends_are_finished_and_all_others_wait(
    device: Device, own: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = await own.rows("a text")
    gate = Gate(own, monkeypatch)
    running = asyncio.ensure_future(own.rows("a text"))
    assert await asyncio.to_thread(gate.has_begun.wait, DEADLINE_S)
    asked = [asyncio.ensure_future(own.pool(PoolingRequest("r", ("b",)))) for _ in range(3)]
    await until(lambda: sum(map(len, own._queue._ready.values())) == 3)
    device.holder = "other"
    assert await asyncio.gather(*asked) == [Asleep(own._replica_id)] * 3
    assert own._sleeper.state is SleepState.AWAKE
    assert not device.other.try_take(), "it still computes"
    gate.open()
    assert await running == expected
    await lose_turn(device, own)


async def test_texts_that_outlast_the_turn_for_too_long_are_computed_in_the_next_one(
    device: Device, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_replica, "graceful_shutdown_timeout_s", lambda: 0.0)
    own = Replica(folders["classify"], "classify")
    expected = await own.rows("a text")
    gate = Gate(own, monkeypatch)
    backend = local_backend(own)
    async with aclosing(backend):
        asking = asyncio.ensure_future(backend.send(PoolingRequest("r", ("a text",))))
        assert await asyncio.to_thread(gate.has_begun.wait, DEADLINE_S)
        device.holder = "other"
        await until(lambda: own._queue.num_waiting == 1)
        assert own._sleeper.state is not SleepState.ASLEEP, "its weights are still read"
        gate.open()
        await lose_turn(device, own)
        device.other.free()
        device.holder = "tiny"
        assert [each.row for each in await asking] == expected
    assert own.ends == 0
    own.__del__()


async def test_a_pinned_model_that_nobody_asks_wakes_in_its_turn(
    device: Device, own: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lose_turn(device, own)
    await until(lambda: own._sleeper._change is None)
    monkeypatch.setattr(own._sleeper, "_is_kept_awake", pinned)
    device.other.free()
    device.holder = "tiny"
    await own.check_health()
    await until(lambda: own._sleeper.state is SleepState.AWAKE)


async def pinned() -> bool:
    return True


def test_turns_on_a_gpu_are_refused(folders: dict[str, Path]) -> None:
    made = TextPooler.__new__(TextPooler)
    made._spec = replace(spec(folders["embed"], task="embed"), turn_group="card")
    made._device = type("Gpu", (), {"torch_device": torch.device("cuda")})()
    with pytest.raises(UnsupportedModelError, match=NO_POOLER_TURNS_ON_GPU):
        made._start()
