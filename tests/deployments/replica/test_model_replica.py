import gc
import os
import pickle
import weakref
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from deployments.contract.model_spec import ModelSpec
from deployments.contract.telemetry.memory_report import MemoryUse, Watched
from deployments.contract.telemetry.metric_store import MetricStore
from deployments.contract.telemetry.metric_table import ANY_REPLICA, GENERATOR
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.device.device import CpuDevice, MemoryDevice
from deployments.plan.memory_budget import DeviceMemoryError
from deployments.plan.replica_plan import plan_replica
from deployments.plan.replica_report import (
    MemoryPlan,
    ReplicaState,
    SleepState,
    WorkCounts,
)
from deployments.plan.sizes import DeviceMemory
from deployments.plan.start_times import last_start_s, last_wake_s
from deployments.replica import model_replica
from deployments.replica.metrics import MemoryMetrics, ReplicaMetrics
from deployments.replica.model_replica import ModelReplica
from tests.deployments.tiny_folder import spec
from tests.failing import failing
from tests.hub_configs import shape_of

PLAN = plan_replica(spec("m"), shape_of("qwen2.5-7b-instruct"), DeviceMemory(48 * 2**30))
MEMORY = MemoryPlan.of(PLAN)


@dataclass(frozen=True)
class FakeModel:
    memory: MemoryPlan = MEMORY
    num_parameters: int = 7
    dtype: str = "bfloat16"
    num_threads: int = 3
    summary: str = "a fake model"
    attention: str | None = "attention by length"


class Replica(ModelReplica):
    """Counts its starts and stops."""

    num_starts = 0
    num_stops = 0
    sickness: Exception | None = None
    is_dead = False

    async def _check_health(self) -> None:
        if self.sickness is not None:
            raise self.sickness

    @property
    def _is_dead(self) -> bool:
        return self.is_dead

    @property
    def _light_sleep(self) -> None:
        return None

    @property
    def _work(self) -> WorkCounts:
        return WorkCounts(1, 2)

    def _start(self) -> None:
        self.num_starts += 1
        self._facts = FakeModel()

    def _stop(self) -> None:
        self.num_stops += 1


class Engine:
    """Sleeps and wakes at once."""

    async def sleep(self) -> bool:
        return True

    async def wake(self) -> None:
        pass


class SleepingReplica(Replica):
    """Has an engine that can sleep."""

    def _start(self) -> None:
        super()._start()
        self._metrics = ReplicaMetrics(MetricStore(GENERATOR), "m")
        self._sleeper = self._open_sleeper(Engine(), None, lambda: None, lambda: None)


def open_cpu(_: ModelSpec) -> MemoryDevice:
    return CpuDevice()


def test_a_replica_starts_its_model_and_logs_where_it_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert Replica(spec("m", num_gpus=0.5), open_cpu).num_starts == 1
    for words in ("tiny is ready", "share 0.5", "3 compute thread(s), a fake model"):
        assert words in caplog.text


def test_a_replica_that_is_an_actor_keeps_how_long_its_start_took(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    Replica(spec("m"), open_cpu)
    assert last_start_s(spec("m")) is None, "the tests' process has begun long before"
    monkeypatch.setattr(model_replica, "is_actor", lambda: True)
    started = Replica(spec("m"), open_cpu)
    assert last_start_s(spec("m")) == started._phases.total_s


def test_a_replica_that_is_an_actor_keeps_how_long_it_took_to_wake(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_replica, "is_actor", lambda: True)
    sleeper = SleepingReplica(spec("m"), open_cpu)._sleeper
    sleeper._note(SleepState.AWAKE)
    assert last_wake_s(spec("m")) is None, "it has never slept"
    sleeper.report = replace(sleeper.report, num_sleeps=1, last_wake_s=0.4)
    sleeper._note(SleepState.AWAKE)
    sleeper.report = replace(sleeper.report, num_sleeps=2, last_wake_s=0.5)
    sleeper._note(SleepState.ASLEEP)
    assert last_wake_s(spec("m")) == 0.4


def test_a_replica_that_may_sleep_is_freed_as_soon_as_it_is_let_go() -> None:
    gc.disable()
    try:
        replica = SleepingReplica(spec("m"), open_cpu)
        seen = weakref.ref(replica)
        del replica
        assert seen() is None
    finally:
        gc.enable()


def test_a_replica_that_is_let_go_stops_its_model() -> None:
    replica = Replica(spec("m"), open_cpu)
    replica.__del__()
    assert replica.num_stops == 1
    assert replica._monitor.join(60)


def test_a_replica_without_a_device_starts_nothing() -> None:
    replica = Replica.__new__(Replica)
    with pytest.raises(ValueError, match="no GPU"):
        Replica.__init__(replica, spec("m"), failing(ValueError("no GPU")))
    assert replica.num_starts == 0
    replica.__del__()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (KeyError("su"), UnsupportedModelError("KeyError: 'su'")),
        (ValueError("a template\nis wrong"), UnsupportedModelError("a template is wrong")),
        (RuntimeError("CUDA error"), None),
        (ConnectionError("the hub"), None),
        (DeviceMemoryError("too little is free"), None),
    ],
)
def test_an_error_that_the_next_start_would_meet_too_is_told_as_final(
    error: Exception, raised: Exception | None
) -> None:
    with pytest.raises(type(raised or error)) as caught:
        Replica(spec("m"), failing(error))
    assert str(caught.value) == str(raised or error)


def test_a_replica_that_can_t_start_logs_one_line_and_raises_no_other_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(_: ModelSpec) -> MemoryDevice:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise UnsupportedModelError("can't load 'x': the disk is full") from error

    with pytest.raises(UnsupportedModelError) as caught:
        Replica(spec("m"), fail)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
    on_screen = [r.getMessage() for r in caplog.records if getattr(r, "log_to_stderr", True)]
    assert on_screen == ["tiny can't start: can't load 'x': the disk is full"]
    assert "No space left on device" in caplog.text  # the traceback, in the file


def test_a_replica_counts_weights_instead_of_drawing_their_bar(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: transformers_logging.set_tqdm_hook(None))
    replica = Replica(spec("m"), open_cpu)
    assert list(transformers_logging.tqdm([1, 2], desc="Loading weights")) == [1, 2]
    report = replica._progress.report()
    assert (report.num_tensors, report.total_tensors) == (2, 2)
    assert capsys.readouterr().err == ""
    assert list(transformers_logging.tqdm([1, 2], desc="Fetching files")) == [1, 2]
    assert "Fetching files" in capsys.readouterr().err


CUDA_ERROR = (
    "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"
)


async def test_a_replica_that_is_dead_ends_its_process_and_logs_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ends: list[str] = []
    replica = Replica(spec("m"), open_cpu, lambda: ends.append("ended"))
    await replica.check_health()
    replica.sickness, replica.is_dead = RuntimeError("the thread has ended"), True
    replica.sickness.__cause__ = torch.AcceleratorError(CUDA_ERROR)
    with pytest.raises(RuntimeError, match="has ended"):
        await replica.check_health()
    assert ends == ["ended"]
    on_screen = [r for r in caplog.records if getattr(r, "log_to_stderr", True)]
    assert [r.getMessage() for r in on_screen if r.levelname == "ERROR"] == [
        "tiny can't go on and is replaced: the thread has ended "
        "(AcceleratorError: CUDA error: an illegal memory access was encountered)"
    ]


async def test_a_replica_that_may_recover_goes_on() -> None:
    ends: list[str] = []
    replica = Replica(spec("m"), open_cpu, lambda: ends.append("ended"))
    replica.sickness = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        await replica.check_health()
    assert ends == []


async def test_a_replica_reports_where_it_runs_and_what_it_does() -> None:
    replica = Replica(spec("m", num_gpus=0.5), open_cpu)
    replica._monitor.sample()
    report = pickle.loads(pickle.dumps(await replica.inspect()))
    replica.__del__()
    assert (report.replica_id, report.node) == (replica._replica_id, "127.0.0.1")
    assert (report.process_id, report.share) == (os.getpid(), 0.5)
    assert report.device.startswith("CPU of")
    assert (report.plan, report.work) == (MEMORY, WorkCounts(1, 2))
    assert report.plan.usable_bytes == PLAN.kv.share_bytes > report.plan.kv_bytes > 0
    assert report.state is ReplicaState.HEALTHY
    assert report.state_unix_s == report.ready_unix_s
    assert report.memory.use.process_bytes > 0
    assert len(report.memory.history.unix_s) >= 1
    assert report.memory.share_bytes is None


async def test_a_replica_reports_since_when_its_health_checks_fail() -> None:
    replica = Replica(spec("m"), open_cpu)
    states = [(await replica.inspect()).state]
    since_s = set[float]()
    replica.sickness = RuntimeError("out of memory")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            await replica.check_health()
        report = await replica.inspect()
        states.append(report.state)
        since_s.add(report.state_unix_s)
    replica.sickness = None
    await replica.check_health()
    states.append((await replica.inspect()).state)
    healthy, failing = ReplicaState.HEALTHY, ReplicaState.FAILING
    assert states == [healthy, failing, failing, healthy]
    assert len(since_s) == 1


def test_a_replica_logs_and_counts_a_warning_when_it_begins(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    store = MetricStore(ANY_REPLICA)
    uses = iter([96, 97, 90])

    def read() -> MemoryUse:
        return MemoryUse(device_total_bytes=100, device_used_bytes=next(uses))

    made = model_replica._monitor_of(spec("m"), CpuDevice(), read, MemoryMetrics(store, "tiny"))
    for _ in range(3):
        made.sample()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert told[0].startswith("tiny: memory is short: all processes on its node use")
    assert told[1] == "tiny: memory is no longer short (device)"
    counted = store.snapshot().series["raystream_memory_warnings_total"]
    assert counted == ((("tiny", Watched.DEVICE), (1,)),)
