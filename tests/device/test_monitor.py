import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.telemetry.memory_report import (
    WARN_BELOW,
    WARN_FROM,
    MemoryUse,
    MemoryWarning,
    Watched,
)
from deployments.device import monitor
from deployments.device.monitor import NUM_SAMPLES, NUM_WARNINGS, MemoryMonitor

TOTAL_BYTES = 1000
DEADLINE_S = 60


class Machine:
    """A machine whose memory the test sets, with a clock that the test advances."""

    def __init__(self, share_bytes: int | None = None) -> None:
        self.use = MemoryUse(device_total_bytes=TOTAL_BYTES, device_used_bytes=0, process_bytes=5)
        self.now_s = 100.0
        self.seen: list[MemoryUse] = []
        self.told: list[MemoryWarning] = []
        self.monitor = MemoryMonitor(
            lambda: self.use, share_bytes, self.seen.append, self.told.append, lambda: self.now_s
        )

    def sample(self, used_bytes: int) -> None:
        self.use = MemoryUse(device_total_bytes=TOTAL_BYTES, device_used_bytes=used_bytes)
        self.monitor.sample()
        self.now_s += 1


def test_a_warning_begins_at_one_threshold_and_ends_below_another() -> None:
    machine = Machine()
    for used_bytes in (949, 950, 990, 930, 950, 920):
        machine.sample(used_bytes)
        assert len(machine.told) == (used_bytes != 949)
    (lasting,) = machine.monitor.report.warnings
    assert lasting == MemoryWarning(Watched.DEVICE, 950, TOTAL_BYTES, 101.0)
    machine.sample(919)
    (ended,) = machine.monitor.report.warnings
    assert ended == MemoryWarning(Watched.DEVICE, 950, TOTAL_BYTES, 101.0, 106.0)
    assert machine.told == [lasting, ended]
    machine.sample(950)
    assert [each.ended_unix_s for each in machine.monitor.report.warnings] == [106.0, None]


@given(st.lists(st.integers(0, TOTAL_BYTES), max_size=60))
def test_warnings_begin_and_end_in_turn_and_only_at_crossings(levels: list[int]) -> None:
    machine, is_short, num_told = Machine(), False, 0
    for used_bytes in levels:
        machine.sample(used_bytes)
        if not is_short and used_bytes >= WARN_FROM * TOTAL_BYTES:
            is_short, num_told = True, num_told + 1
        elif is_short and used_bytes < WARN_BELOW * TOTAL_BYTES:
            is_short, num_told = False, num_told + 1
        assert len(machine.told) == num_told
    assert [each.ended_unix_s is not None for each in machine.told] == [
        bool(i % 2) for i in range(num_told)
    ]
    assert len(machine.monitor.report.warnings) <= NUM_WARNINGS + 1


def test_the_share_of_a_gpu_is_watched_by_what_its_allocator_holds() -> None:
    machine = Machine(share_bytes=400)
    machine.use = MemoryUse(
        device_total_bytes=1000, device_used_bytes=500, reserved_bytes=390, allocated_bytes=350
    )
    machine.monitor.sample()
    assert [(each.of, each.used_bytes, each.limit_bytes) for each in machine.told] == [
        (Watched.SHARE, 390, 400)
    ]
    assert machine.monitor.report.share_bytes == 400
    assert machine.monitor.report.use.fragmented_bytes == 40


def test_a_figure_that_is_not_known_neither_begins_nor_ends_a_warning() -> None:
    machine = Machine(share_bytes=400)
    machine.use = MemoryUse()
    machine.monitor.sample()
    assert machine.told == []
    machine.sample(999)
    machine.use = MemoryUse()
    machine.monitor.sample()
    assert len(machine.told) == 1
    assert machine.monitor.report.use.fragmented_bytes is None


def test_the_history_holds_the_latest_samples_as_columns() -> None:
    machine = Machine()
    for used_bytes in range(NUM_SAMPLES + 5):
        machine.sample(used_bytes % 100)
    history = machine.monitor.report.history
    assert len(history.unix_s) == NUM_SAMPLES
    assert history.unix_s[0] == 105.0
    assert history.device_used_bytes is not None
    assert history.device_used_bytes[:2] == (5, 6)
    assert history.reserved_bytes is history.process_bytes is None
    assert len(machine.seen) == NUM_SAMPLES + 5


def test_a_column_may_have_gaps() -> None:
    machine = Machine()
    machine.sample(1)
    machine.use = MemoryUse()
    machine.monitor.sample()
    assert machine.monitor.report.history.device_used_bytes == (1, None)


def test_before_the_first_sample_nothing_is_known() -> None:
    report = Machine().monitor.report
    assert (report.use, report.history.unix_s, report.warnings) == (MemoryUse(), (), ())


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.001)


@pytest.mark.usefixtures("fast")
def test_the_thread_samples_until_it_is_stopped() -> None:
    sampled = threading.Event()

    def uses() -> Iterator[MemoryUse]:
        yield MemoryUse(process_bytes=1)
        yield MemoryUse(process_bytes=2)
        sampled.set()
        while True:
            yield MemoryUse(process_bytes=3)

    made = MemoryMonitor(uses().__next__)
    made.start()
    assert sampled.wait(DEADLINE_S)
    made.stop()
    assert made.join(DEADLINE_S)
    assert made.report.history.process_bytes is not None
    assert made.report.history.process_bytes[:2] == (1, 2)


@pytest.mark.usefixtures("fast")
def test_a_reader_that_fails_is_logged_once_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recovered, failed_again = threading.Event(), threading.Event()
    errors = iter([OSError("gone"), OSError("gone"), None, OSError("again")])

    def read() -> MemoryUse:
        error = next(errors, None)
        if error is not None:
            if str(error) == "again":
                failed_again.set()
            raise error
        recovered.set()
        return MemoryUse(process_bytes=1)

    made = MemoryMonitor(read)
    made.start()
    assert recovered.wait(DEADLINE_S)
    assert failed_again.wait(DEADLINE_S)
    made.stop()
    assert made.join(DEADLINE_S)
    assert [r.getMessage() for r in caplog.records] == ["the memory in use can't be read"] * 2
