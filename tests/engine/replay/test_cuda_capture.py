"""Captures on a real GPU, and what a failed one leaves behind: a fake keeps torch's books.

As in torch, the fake's `capture_end` clears the books only where CUDA ends the capture, which it
refuses to do for an invalidated one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import finalize

import pytest
import torch

from deployments.compute import device_errors
from deployments.compute.device_errors import release_cache
from deployments.engine.replay.cuda_capture import CudaCapturer, open_capturer
from tests.failing import failing

GPU = torch.device("cuda", 0)
INVALIDATED = torch.AcceleratorError("CUDA error: operation failed due to a previous error")


def test_a_cpu_has_no_capturer() -> None:
    assert open_capturer(torch.device("cpu")) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_can_not_use_has_no_capturer(caplog: pytest.LogCaptureFixture) -> None:
    assert open_capturer(torch.device("cuda", 0)) is None
    assert "no CUDA graphs" in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_replay_uses_the_current_inputs() -> None:
    capturer = open_capturer(torch.device("cuda", 0))
    assert capturer is not None
    inputs, outputs = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    weights = torch.randn(4, 4, device="cuda")
    capturer.warm_up(lambda: weights @ inputs)
    graph = capturer.capture(lambda: outputs.copy_(weights @ inputs))
    inputs.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(outputs, weights @ inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_replay_in_parts_computes_what_one_does() -> None:
    capturer = open_capturer(torch.device("cuda", 0))
    assert capturer is not None
    inputs, outputs = torch.zeros(4, device="cuda"), torch.zeros(4, device="cuda")
    weights = torch.randn(4, 4, device="cuda")

    def run() -> torch.Tensor:
        between = weights @ inputs
        capturer.divide()
        return outputs.copy_(weights @ between)

    capturer.warm_up(run)
    graph = capturer.capture(run)
    inputs.fill_(2.0)
    graph.replay()
    torch.testing.assert_close(outputs, weights @ (weights @ inputs))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_failed_capture_leaves_its_stream() -> None:
    capturer = open_capturer(torch.device("cuda", 0))
    assert capturer is not None
    inputs = torch.ones(4, device="cuda")
    before = torch.cuda.current_stream()

    def wait() -> torch.Tensor:
        return inputs * inputs.sum().item()

    capturer.warm_up(wait)
    with pytest.raises(RuntimeError):
        capturer.capture(wait)
    assert torch.cuda.current_stream() == before
    assert (inputs + 1).tolist() == [2.0] * 4
    assert torch.randn(4, device="cuda").isfinite().all()


class NewGraph:
    """A CUDA graph that holds nothing yet; its replay is an event."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.replay = partial(events.append, f"replay {name}")


class FakeCuda:
    """The parts of torch.cuda that captures use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.underway: list[int] = []  # pools for which the allocator counts a capture as running
        self.num_users: dict[int, int] = {}  # graphs that hold each pool
        self.captured: list[int] = []  # the pool of each capture, in order
        self.events: list[str] = []  # what happened on streams, in order
        self.num_graphs = 0
        self.generator_state = "captured"  # that of the device's default generator
        self.main = self._make_stream("main")
        for name, fake in {
            "Stream": lambda device: self._make_stream("side"),
            "current_stream": lambda device: self.main,
            "stream": self._stream,
            "graph_pool_handle": self._make_pool,
            "CUDAGraph": self._make_graph,
            "graph": self._capture,
            "empty_cache": self._empty_cache,
            "synchronize": lambda device: self.events.append("wait"),
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(torch, "Generator", lambda device: self)
        monkeypatch.setattr(torch.cuda, "default_generators", (self,))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", self._release)

    def _make_stream(self, name: str) -> Any:
        def wait(other: Any) -> None:
            self.events.append(f"{name} waits for {other.name}")

        return SimpleNamespace(name=name, wait_stream=wait)

    def graphsafe_get_state(self) -> str:
        """As a new generator."""
        return "new"

    def graphsafe_set_state(self, state: str) -> None:
        """As the device's default generator."""
        self.generator_state = state

    def _make_graph(self) -> Any:
        self.num_graphs += 1
        return NewGraph(str(self.num_graphs), self.events)

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
        # A pool that all its graphs have left, while a tensor still lies there.
        assert self.num_users[pool] or pool not in self.captured, "use_count > 0 INTERNAL ASSERT"
        self.underway.append(pool)
        self.captured.append(pool)
        self.num_users[pool] += 1
        try:
            yield
        except torch.AcceleratorError as error:
            raise INVALIDATED from error
        except Exception:
            self.underway.remove(pool)
            self.num_users[pool] -= 1  # as the graph's destructor does
            raise
        self.underway.remove(pool)
        finalize(graph, self._release, 0, pool)

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


def test_an_invalidated_capture_does_not_stay_in_the_allocators_books(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(GPU)
    with pytest.raises(torch.AcceleratorError, match="previous error"):
        capturer.capture(failing(torch.AcceleratorError("CUDA error: operation not permitted")))
    assert cuda.underway == []
    assert set(cuda.num_users.values()) == {0}
    assert cuda.generator_state == "new"
    release_cache(GPU)
    capturer.capture(lambda: torch.zeros(1))
    assert cuda.events.count("enter side") == cuda.events.count("leave side") == 2


def test_a_divided_capture_is_replayed_in_order(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(GPU)

    def run() -> torch.Tensor:
        for _ in range(2):
            capturer.divide()
        return torch.zeros(1)

    run()
    assert cuda.num_graphs == 0
    graph = capturer.capture(run)
    assert (cuda.num_graphs, cuda.underway) == (3, [])
    assert len(set(cuda.captured)) == 1
    cuda.events.clear()
    graph.replay()
    assert cuda.events == ["replay 1", "replay 2", "replay 3"]


def test_a_capture_that_fails_in_a_later_part_leaves_nothing(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(GPU)

    def run() -> torch.Tensor:
        capturer.divide()
        raise torch.AcceleratorError("CUDA error: operation not permitted")

    with pytest.raises(torch.AcceleratorError, match="previous error"):
        capturer.capture(run)
    assert cuda.underway == []
    assert cuda.generator_state == "new"
    capturer.divide()  # nothing is captured any more
    capturer.capture(lambda: torch.zeros(1))
    assert cuda.num_graphs == 3


def test_a_capture_that_can_not_begin_says_why(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturer = CudaCapturer(GPU)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", failing(torch.OutOfMemoryError("no room")))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        capturer.capture(lambda: torch.zeros(1))


def test_a_capture_that_torch_has_ended_is_not_ended_twice(cuda: FakeCuda) -> None:
    capturer = CudaCapturer(GPU)
    first = capturer.capture(lambda: torch.zeros(1))
    with pytest.raises(torch.OutOfMemoryError):
        capturer.capture(failing(torch.OutOfMemoryError("no room")))
    assert sum(cuda.num_users.values()) == 1, first


def test_graphs_share_a_pool_and_after_all_were_dropped_the_next_ones_do_not_need_it(
    cuda: FakeCuda,
) -> None:
    capturer = CudaCapturer(GPU)
    graphs = [capturer.capture(lambda: torch.zeros(1)) for _ in range(3)]
    assert len(set(cuda.captured)) == 1
    graphs.clear()
    assert not any(cuda.num_users.values())
    graphs += [capturer.capture(lambda: torch.zeros(1)) for _ in range(2)]
    assert len(set(cuda.captured)) == 2
    assert cuda.num_users[cuda.captured[-1]] == 2


def test_after_a_failed_warm_up_the_stream_waits_for_what_was_launched(cuda: FakeCuda) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        CudaCapturer(GPU).warm_up(failing(torch.OutOfMemoryError("no room")))
    assert cuda.events == ["side waits for main", "enter side", "leave side", "main waits for side"]


def test_a_cache_is_emptied_after_the_device_has_finished(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cuda.events.append("empty"))
    release_cache(GPU)
    assert cuda.events == ["wait", "empty"]


def test_a_cache_that_can_not_be_emptied_raises_nothing(
    cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.underway.append(7)
    release_cache(GPU)
    assert "could not empty" in caplog.text


def test_emptying_the_cache_of_a_failed_device_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.cuda,
        "empty_cache",
        failing(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")),
    )
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        device_errors.release_cache(GPU)
