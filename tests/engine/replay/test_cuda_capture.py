"""What a failure of a capture leaves behind, with torch's books kept by a fake of its allocator.

As in torch, `capture_end` clears the books only where CUDA ends the capture, which it refuses to do
once something has spoilt it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deployments.engine import device_errors
from deployments.engine.cuda.graph_capture import CudaCapturer
from deployments.engine.device_errors import release_cache

GPU = torch.device("cuda", 0)
SPOILT = torch.AcceleratorError("CUDA error: operation failed due to a previous error")


class FakeCuda:
    """The pieces of torch.cuda that captures touch.

    Attributes:
        underway: Pools to which the allocator believes a capture is recording.
        num_users: Graphs that hold each pool.
        events: What streams and stream contexts were told, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.underway: list[int] = []
        self.num_users: dict[int, int] = {}
        self.events: list[str] = []
        self.main = self._make_stream("main")
        for name, fake in {
            "Stream": lambda device: self._make_stream("side"),
            "current_stream": lambda device: self.main,
            "stream": self._stream,
            "graph_pool_handle": self._make_pool,
            "CUDAGraph": SimpleNamespace,
            "graph": self._capture,
            "empty_cache": self._empty_cache,
            "synchronize": lambda device: self.events.append("wait"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self._release)

    def _make_stream(self, name: str) -> Any:
        def wait(other: Any) -> None:
            self.events.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait)

    def _make_pool(self) -> int:
        self.num_users[len(self.num_users)] = 0
        return len(self.num_users) - 1

    @contextmanager
    def _stream(self, stream: Any) -> Iterator[None]:
        self.events.append(f"enter {stream.name}")
        try:
            yield
        finally:
            self.events.append(f"leave {stream.name}")

    @contextmanager
    def _capture(
        self, graph: Any, *, pool: int, stream: Any, capture_error_mode: str
    ) -> Iterator[None]:
        self._empty_cache()
        assert pool not in self.underway, "already recording"
        self.underway.append(pool)
        self.num_users[pool] += 1
        try:
            yield
        except torch.AcceleratorError as error:
            raise SPOILT from error
        except Exception:
            self.underway.remove(pool)
            self.num_users[pool] -= 1  # the graph's destructor
            raise
        self.underway.remove(pool)

    def _empty_cache(self) -> None:
        if self.underway:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def _end(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def _release(self, device: int, pool: int) -> None:
        self.num_users[pool] -= 1
        assert self.num_users[pool] >= 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def raising(error: Exception) -> Any:
    def run() -> torch.Tensor:
        raise error

    return run


def test_a_capture_that_was_spoilt_does_not_stay_in_the_allocators_books(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(GPU)
    with pytest.raises(torch.AcceleratorError, match="previous error"):
        capturer.capture(raising(torch.AcceleratorError("CUDA error: operation not permitted")))
    assert cuda.underway == []
    assert set(cuda.num_users.values()) == {0}
    release_cache(GPU)
    capturer.capture(lambda: torch.zeros(1))
    assert cuda.events.count("enter side") == cuda.events.count("leave side") == 2


def test_a_capture_that_torch_itself_has_ended_is_not_ended_twice(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(GPU)
    capturer.capture(lambda: torch.zeros(1))
    with pytest.raises(torch.OutOfMemoryError):
        capturer.capture(raising(torch.OutOfMemoryError("no room")))
    assert cuda.num_users == {0: 1}  # the first graph's


def test_after_a_warm_up_that_failed_the_stream_still_waits_for_what_it_launched(
    cuda: FakeCuda,
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        CudaCapturer(GPU).warm_up(raising(torch.OutOfMemoryError("no room")))
    assert cuda.events == ["side waits for main", "enter side", "leave side", "main waits for side"]


def test_a_cache_is_emptied_once_the_device_is_done(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cuda.events.append("empty"))
    release_cache(GPU)
    assert cuda.events == ["wait", "empty"]


def test_a_cache_that_can_not_be_emptied_ends_nothing(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.underway.append(7)
    release_cache(GPU)
    assert "could not be emptied" in caplog.text


def test_a_device_that_is_gone_is_told_as_such_when_its_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        device_errors.release_cache(GPU)
