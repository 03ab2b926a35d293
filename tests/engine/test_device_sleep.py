"""The light sleep of an engine on a GPU, with a strict stand-in for the card's memory."""

import errno
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from deployments.compute.card_room import ROOM_TIMEOUT_S, wait_for_room
from deployments.compute.gpu import device_memory
from deployments.compute.gpu.device_memory import SPARE_BYTES, DeviceMemory
from deployments.contract.sampling_params import SamplingParams
from deployments.engine import engine as engine_module
from deployments.engine.attention.kv_cache import KVCache
from deployments.engine.engine import Engine
from deployments.engine.model.runner import ModelRunner
from deployments.engine.scheduling.kv_table import KVTable
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan import cgroup
from tests.engine.collector import GREEDY, Collector
from tests.engine.fake_card import FakeCard, kv_tensors, storages
from tests.engine.layouts import LAYOUTS
from tests.engine.tiny_models import MODELS, generate, load, make_engine, qwen2
from tests.failing import failing

pytestmark = pytest.mark.slow

PROMPTS = {f"s{i}": tuple(50 + (7 * i + 3 * j) % 200 for j in range(20 + 3 * i)) for i in range(3)}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeCard:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 2 * SPARE_BYTES)
    return FakeCard(monkeypatch)


def open_engine(make_model: Callable[[], Any] = qwen2) -> Engine:
    engine = make_engine(load(make_model))
    engine.warm_up()
    return engine


def answers(engine: Engine, number: int = 0) -> dict[str, list[int]]:
    """Return the tokens after all prompts, whose sequences run together."""
    collector = Collector(engine)
    for name, prompt in PROMPTS.items():
        engine.add(SequenceRequest(f"{name}-{number}", prompt, GREEDY))
    collector.run()
    return {name: collector.token_ids(f"{name}-{number}") for name in PROMPTS}


def sleep_and_wake(engine: Engine, card: FakeCard, make_model: Callable[[], Any]) -> None:
    """Check that an engine gives all memory back, and answers as the stock model afterwards."""
    expected = {name: generate(make_model, prompt, 12) for name, prompt in PROMPTS.items()}
    assert answers(engine) == expected
    num_captured, num_cached = engine.num_captured, engine.stats.num_cached_tokens
    assert num_captured > 1
    for number in (1, 2):
        assert engine.sleep()
        assert engine.is_asleep
        assert not any(each.nbytes() for each in storages(engine))
        assert engine.num_captured == 0
        assert card.is_cache_empty
        assert engine.sleep()  # it sleeps on
        engine.wake()
        engine.wake()  # it is awake
        assert not engine.is_asleep
        assert engine.num_captured == num_captured
        assert card.capturer.num_stale_replays == 0
        num_replays = card.capturer.num_replays
        # Padding of captured steps is stored in the spare token, the last one.
        assert not any(each[:-1].any() for each in kv_tensors(engine))
        assert answers(engine, number) == expected
        # Steps would be computed again after a replay that raises.
        assert card.capturer.num_stale_replays == 0
        assert card.capturer.num_replays > num_replays
        assert engine.stats.num_cached_tokens == num_cached
        engine.check()


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_engine_gives_all_its_memory_back_and_answers_as_before(
    card: FakeCard, name: str, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level == 2:
        monkeypatch.setattr(cgroup, "available_bytes", lambda: SPARE_BYTES)
    engine = open_engine(MODELS[name])
    assert engine.sleep_level is None
    sleep_and_wake(engine, card, MODELS[name])
    assert engine.sleep_level == level


def replaying_old_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "drop_captured", lambda runner: None)
    monkeypatch.setattr(ModelRunner, "prepare", lambda runner: None)


def leaving_keys_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "take_back", lambda kv: kv._memory.take_back())


def remembering_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVTable, "drop_retained", lambda table: None)


def keeping_the_last_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    make = DeviceMemory.__init__

    def make_without_last(memory: DeviceMemory, tensors: Any, device: torch.device) -> None:
        make(memory, [*tensors][:-1], device)

    monkeypatch.setattr(DeviceMemory, "__init__", make_without_last)


def leaving_a_weight_unfilled(monkeypatch: pytest.MonkeyPatch) -> None:
    send = device_memory._send
    monkeypatch.setattr(device_memory, "_send", lambda run, block: send(run[1:], block))


def keeping_the_allocators_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "release_cache", lambda device: None)


def not_waiting_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "wait_for", lambda device: None)


@pytest.mark.parametrize(
    "broken",
    [
        replaying_old_graphs,
        leaving_keys_as_they_come,
        remembering_prefixes,
        keeping_the_last_weight,
        leaving_a_weight_unfilled,
        keeping_the_allocators_cache,
        not_waiting_for_the_device,
    ],
    ids=lambda broken: broken.__name__.replace("_", " "),
)
def test_each_of_these_faults_is_found(
    card: FakeCard, broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    engine = open_engine()
    with pytest.raises(AssertionError):
        sleep_and_wake(engine, card, qwen2)


@pytest.mark.parametrize("is_freed", [True, False])
def test_an_engine_that_wakes_waits_for_memory_that_the_driver_frees_late(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, is_freed: bool
) -> None:
    engine = open_engine()
    assert engine.sleep()
    resize, refused = torch.UntypedStorage.resize_, list[int]()

    def without_room(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        if num_bytes and (len(refused) < 3 or not is_freed):
            refused.append(num_bytes)
            raise torch.OutOfMemoryError("another process still holds it")
        return resize(storage, num_bytes)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", without_room)
    slept = list[float]()
    wait = partial(wait_for_room, now_s=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(device_memory, "wait_for_room", wait)
    if is_freed:
        engine.wake()
        assert len(refused) == len(slept) == 3
        assert answers(engine) == {n: generate(qwen2, each, 12) for n, each in PROMPTS.items()}
    else:
        with pytest.raises(torch.OutOfMemoryError):
            engine.wake()
        assert sum(slept) == pytest.approx(ROOM_TIMEOUT_S, abs=0.2)


def test_graphs_that_were_captured_before_a_sleep_are_never_replayed(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaying_old_graphs(monkeypatch)
    engine = open_engine()
    assert engine.sleep()
    engine.wake()
    answers(engine)
    assert card.capturer.num_stale_replays > 0  # the stand-in notices


def test_an_engine_with_work_does_not_sleep(card: FakeCard) -> None:
    engine = open_engine()
    engine.add(SequenceRequest("s", PROMPTS["s0"], SamplingParams(temperature=0, max_tokens=12)))
    collector = Collector(engine)
    for _ in range(3):
        assert not engine.sleep()
        assert not engine.is_asleep
        assert all(each.nbytes() for each in storages(engine))
        collector.step()
    collector.run()
    assert collector.token_ids("s") == generate(qwen2, PROMPTS["s0"], 12)
    assert engine.sleep()


def test_an_engine_without_room_for_its_weights_stays_awake(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "posix_fallocate", failing(full))
    engine = open_engine()
    num_captured = engine.num_captured
    assert not engine.sleep()
    assert not engine.is_asleep
    assert engine.num_captured == num_captured
    assert "can't sleep: its weights can't be written: [Errno 28]" in caplog.text
    assert all(each.nbytes() for each in storages(engine))
    expected = {name: generate(qwen2, prompt, 12) for name, prompt in PROMPTS.items()}
    assert answers(engine) == expected
    assert card.capturer.num_stale_replays == 0


def test_a_lost_device_ends_the_engine_that_would_sleep(
    card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "pinned_block", failing(RuntimeError("unspecified launch")))
    for module in (device_memory, engine_module):
        monkeypatch.setattr(module, "is_fatal", lambda error: True)
    engine = open_engine()
    with pytest.raises(RuntimeError, match="unspecified launch"):
        engine.sleep()


def test_a_capture_that_fails_at_the_wake_leaves_plain_steps(
    card: FakeCard, caplog: pytest.LogCaptureFixture
) -> None:
    engine = open_engine()
    expected = answers(engine)
    assert engine.sleep()
    card.capturer.error = RuntimeError("no more graphs")
    engine.wake()
    assert engine.num_captured == 0
    assert answers(engine, 1) == expected
    assert engine.sleep()
    with caplog.at_level(logging.WARNING):
        caplog.clear()
        engine.wake()  # it is not tried again
    assert not caplog.records
    assert answers(engine, 2) == expected


def test_captures_that_had_no_memory_at_one_wake_are_made_at_the_next(card: FakeCard) -> None:
    engine = open_engine()
    expected, num_captured = answers(engine), engine.num_captured
    assert engine.sleep()
    card.capturer.error = torch.OutOfMemoryError("another process still holds it")
    engine.wake()
    assert engine.num_captured == 0
    num_warm_ups = card.capturer.num_warm_ups
    assert answers(engine, 1) == expected
    assert card.capturer.num_warm_ups == num_warm_ups  # no step pays for another attempt
    assert engine.sleep()
    card.capturer.error = None
    engine.wake()
    assert engine.num_captured == num_captured
    assert answers(engine, 2) == expected
