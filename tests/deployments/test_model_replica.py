from dataclasses import dataclass

import pytest
import torch
from transformers.utils import logging as transformers_logging

from deployments.compute.errors import UnsupportedModelError
from deployments.device.device import CpuDevice, MemoryDevice
from deployments.model_replica import ModelReplica
from deployments.model_spec import ModelSpec
from tests.deployments.tiny_folder import spec


@dataclass(frozen=True)
class FakeModel:
    num_threads: int = 3
    summary: str = "a fake model"


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

    def _start(self) -> FakeModel:
        self.num_starts += 1
        return FakeModel()

    def _stop(self) -> None:
        self.num_stops += 1


def open_cpu(_: ModelSpec) -> MemoryDevice:
    return CpuDevice()


def test_a_replica_starts_its_model_and_logs_where_it_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    assert Replica(spec("m", num_gpus=0.5), open_cpu).num_starts == 1
    for words in ("tiny is ready", "share 0.5", "3 compute thread(s), a fake model"):
        assert words in caplog.text


def test_a_replica_that_is_let_go_stops_its_model() -> None:
    replica = Replica(spec("m"), open_cpu)
    replica.__del__()
    assert replica.num_stops == 1


def test_a_replica_without_a_device_starts_nothing() -> None:
    def fail(_: ModelSpec) -> MemoryDevice:
        raise ValueError("no GPU")

    replica = Replica.__new__(Replica)
    with pytest.raises(ValueError, match="no GPU"):
        Replica.__init__(replica, spec("m"), fail)
    assert replica.num_starts == 0
    replica.__del__()


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


def test_a_replica_draws_bars_of_downloads_but_not_of_weights(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: transformers_logging.set_tqdm_hook(None))
    Replica(spec("m"), open_cpu)
    assert list(transformers_logging.tqdm([1, 2], desc="Loading weights")) == [1, 2]
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
