import ctypes
from collections.abc import Sequence

import pytest
import torch

from deployments.compute.cpu.jit.launch import (
    MAX_HELD_US,
    KernelCall,
    captured_by,
    empty,
    empty_like,
    launch,
    releasing_gil,
)
from deployments.compute.cpu.jit.openmp import CFunction


class Capture:
    """Keeps calls, and gives memory filled with ones."""

    def __init__(self) -> None:
        self.calls: list[KernelCall] = []

    def capture(self, call: KernelCall) -> None:
        self.calls.append(call)

    def empty(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.ones(1000, dtype=dtype).as_strided(tuple(shape), tuple(strides))


class Counter:
    """A kernel that counts its runs."""

    def __init__(self) -> None:
        self.num_runs = 0
        self._function = CFunction(self._count)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        assert address is not None
        self.call = KernelCall(address, (ctypes.c_int64 * 1)(0))

    def _count(self, _: int) -> None:
        self.num_runs += 1


@pytest.mark.parametrize("cost_us", [1, 2 * MAX_HELD_US])
def test_a_call_runs_at_once(cost_us: float) -> None:
    counter = Counter()
    launch(counter.call, 1, cost_us)
    assert counter.num_runs == 1


def test_short_calls_keep_the_gil_except_where_other_threads_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    monkeypatch.setattr(
        "deployments.compute.cpu.jit.launch.run_holding_gil",
        lambda function, _: held.append(function),
    )
    counter = Counter()
    with releasing_gil():
        launch(counter.call, 1, 1)
    assert (counter.num_runs, held) == (1, [])
    launch(counter.call, 1, 1)
    assert (counter.num_runs, held) == (1, [counter.call.kernel])


def test_a_captured_call_is_kept_and_does_not_run() -> None:
    counter, capture = Counter(), Capture()
    with captured_by(capture):
        launch(counter.call, 1, 1)
    assert (capture.calls, counter.num_runs) == ([counter.call], 0)
    launch(counter.call, 1, 1)
    assert (capture.calls, counter.num_runs) == ([counter.call], 1)


def test_an_error_ends_the_capture() -> None:
    counter, capture = Counter(), Capture()
    with pytest.raises(ZeroDivisionError), captured_by(capture):
        _ = 1 / 0
    launch(counter.call, 1, 1)
    assert (capture.calls, counter.num_runs) == ([], 1)


def test_outputs_are_in_the_captures_memory() -> None:
    rows = torch.zeros(2, 5, 3).transpose(1, 2)
    with captured_by(Capture()):
        found, like = empty((2, 3), torch.float32), empty_like(rows)
    assert torch.equal(found, torch.ones(2, 3))
    assert torch.equal(like, torch.ones(2, 3, 5))
    assert like.stride() == torch.empty_like(rows).stride()
    assert empty((2, 3), torch.bfloat16).dtype is torch.bfloat16
