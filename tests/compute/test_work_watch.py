import asyncio
import threading

import pytest

from deployments.compute import work_watch
from deployments.compute.work_watch import LEAST_S, WorkWatch, is_hung, max_work_s
from tests.hand_clock import HandClock

GB = 10**9


@pytest.mark.parametrize(
    ("num_weight_bytes", "num_tokens", "device_type", "expected_s"),
    [
        (12 * 10**6, 512, "cpu", LEAST_S),
        (15 * GB, 512, "cpu", 3072.0),
        (15 * GB, 512, "cuda", LEAST_S),
        (15 * GB, 8192, "cuda", 24.576),
    ],
)
def test_the_largest_step_of_a_slow_device_may_end(
    num_weight_bytes: int, num_tokens: int, device_type: str, expected_s: float
) -> None:
    assert max_work_s(num_weight_bytes, num_tokens, device_type) == pytest.approx(expected_s)


def test_the_oldest_work_that_has_not_ended_counts() -> None:
    clock = HandClock()
    watch = WorkWatch(clock)
    assert watch.longest_s == 0
    began, may_end = threading.Event(), threading.Event()

    def work() -> None:
        with watch.working():
            began.set()
            assert may_end.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(10)
    clock.now_s = 3
    with watch.working():
        clock.now_s = 5
        assert watch.longest_s == 5
        may_end.set()
        thread.join(10)
        assert watch.longest_s == 2
    assert watch.longest_s == 0


def test_work_that_fails_has_ended() -> None:
    watch = WorkWatch(HandClock())
    with pytest.raises(ValueError, match="a bug"), watch.working():
        raise ValueError("a bug")
    assert watch.longest_s == 0


class BusyWorker:
    """A worker that is stuck at some of the looks at it, counted from 1."""

    def __init__(self, stuck_at: range) -> None:
        self._stuck_at = stuck_at
        self._num_calls = 0
        self.is_abandoned = False

    @property
    def is_stuck(self) -> bool:
        self._num_calls += 1
        return self._num_calls in self._stuck_at

    def abandon(self) -> None:
        self.is_abandoned = True


@pytest.mark.parametrize(
    ("stuck_at", "num_pings", "hangs"),
    [(range(1, 3), 0, True), (range(2, 3), 1, True), (range(0), 1, False), (range(1, 2), 0, False)],
    ids=["stuck", "stuck after the ping", "long work", "paused with its machine"],
)
async def test_a_worker_is_abandoned_once_its_work_can_only_hang(
    monkeypatch: pytest.MonkeyPatch, stuck_at: range, num_pings: int, hangs: bool
) -> None:
    monkeypatch.setattr(work_watch, "ANSWER_S", 0.01)
    worker = BusyWorker(stuck_at)
    pings = []

    async def ping() -> None:
        pings.append(1)
        await asyncio.Event().wait()

    assert (await is_hung(worker, ping), worker.is_abandoned) == (hangs, hangs)
    assert len(pings) == num_pings
