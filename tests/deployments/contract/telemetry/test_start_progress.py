from deployments.contract.telemetry.start_progress import (
    RATE_S,
    StartPhase,
    StartProgress,
    StartReport,
)
from tests.hand_clock import HandClock


def test_a_start_begins_with_preparing() -> None:
    report = StartProgress("r1", HandClock(100.0)).report()
    assert (report.replica_id, report.phase, report.phase_unix_s) == ("r1", "preparing", 100.0)
    assert (str(report), report.done, report.bytes_per_s) == ("preparing", None, None)


def test_a_download_tells_bytes_files_and_the_rate_of_the_last_seconds() -> None:
    progress = StartProgress("r", clock := HandClock(100.0))
    progress.begin(StartPhase.DOWNLOADING, total_bytes=10**9, total_files=2)
    clock.now_s += 5
    progress.add(num_bytes=500_000_000, num_files=1)
    report = progress.report()
    assert str(report) == "downloading 0.50 of 1.00 GB, 1 of 2 files, 100.0 MB/s"
    assert (report.done, report.bytes_per_s) == (0.5, 1e8)
    for _ in range(3):  # it stands still
        clock.now_s += RATE_S
        stalled = progress.report()
    assert (stalled.bytes_per_s, stalled.num_bytes) == (0.0, 500_000_000)


def test_loading_tells_tensors_and_shards() -> None:
    progress = StartProgress()
    progress.begin(StartPhase.LOADING, total_bytes=15 * 10**9, total_files=4)
    assert str(progress.report()) == "loading"
    progress.expect_tensors(310)
    progress.add(num_tensors=31)
    report = progress.report()
    assert str(report) == "loading 31 of 310 tensors (15.00 GB in 4 files)"
    assert (report.done, report.bytes_per_s) == (0.1, None)


def test_a_new_phase_counts_anew() -> None:
    progress = StartProgress()
    progress.begin(StartPhase.LOADING, total_bytes=1, total_files=1)
    progress.add(num_tensors=1)
    progress.begin(StartPhase.WARMING_UP)
    report = progress.report()
    assert (str(report), report.num_tensors, report.done) == ("warming up", 0, None)


def test_a_small_download_is_told_in_megabytes() -> None:
    report = StartReport("r", StartPhase.DOWNLOADING, 0, 0, 10**6, 13 * 10**6, None, 0, 1)
    assert str(report) == "downloading 1.00 of 13.00 MB, 0 of 1 file"


def test_more_than_was_announced_is_not_more_than_all() -> None:
    report = StartReport("r", StartPhase.DOWNLOADING, 0, 0, num_bytes=3, total_bytes=2)
    assert report.done == 1.0
