import gc
import weakref

import pytest
import torch

from benchmarks.gpu import attempts as attempts_module
from benchmarks.gpu.attempts import Attempts
from tests.failing import failing

pytestmark = pytest.mark.usefixtures("frozen_heap")

CPU = torch.device("cpu")


class Ring:
    """A reference cycle, as an engine is."""

    def __init__(self) -> None:
        self.self = self


def test_a_part_that_succeeds_returns_its_result() -> None:
    attempts = Attempts(CPU, 100)
    assert attempts.run("a sum", lambda: 1 + 1) == 2
    assert attempts.troubles == []


def test_a_failed_part_is_reported_in_one_line_and_frees_its_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attempts_module.logger, "disabled", True)  # pytest would keep the traceback
    rings: list[weakref.ref[Ring]] = []

    def fail() -> None:
        ring = Ring()
        rings.append(weakref.ref(ring))
        raise ValueError("a bad\nthing")

    attempts = Attempts(CPU, 100)
    gc.disable()
    try:
        assert attempts.run("this", fail) is None
    finally:
        gc.enable()
    assert attempts.troubles == ["this: ValueError: a bad"]
    assert rings[0]() is None


def test_no_part_starts_after_the_limit() -> None:
    now = [5.0]
    attempts = Attempts(CPU, 10, lambda: now[0])
    now[0] = 15.0
    assert attempts.run("in time", lambda: 1) == 1
    now[0] = 15.5
    assert attempts.run("late", lambda: 1) is None
    assert attempts.troubles == ["late: no time was left"]


def test_a_failed_device_ends_the_run() -> None:
    attempts = Attempts(CPU, 100)
    with pytest.raises(torch.AcceleratorError):
        attempts.run(
            "this",
            failing(torch.AcceleratorError("CUDA error: an illegal memory access was encountered")),
        )
    assert "illegal memory access" in attempts.troubles[0]
