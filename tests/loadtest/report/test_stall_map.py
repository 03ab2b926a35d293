import pytest

from loadtest.analysis.request_table import build_table
from loadtest.report.stall_map import stall_map, tracks_of
from tests.loadtest.made_runs import made_request


def test_a_stall_is_shown_at_its_user_and_time() -> None:
    steady = made_request(0, queue=0, num_events=20, gap_s=0.05)
    times = (0.5, 0.55, 1.55, 1.6)
    stalled = made_request(1, queue=2, num_events=4).model_copy(
        update={"content_s": times, "ended_s": 1.7}
    )
    found = stall_map([build_table([steady, stalled])])
    assert found.least_ms == pytest.approx(150.0)
    assert found.track.tolist() == [3]
    assert found.gap_ms.tolist() == pytest.approx([1000.0])
    assert (found.started_s[0], found.ended_s[0]) == (pytest.approx(0.55), pytest.approx(1.55))


def test_in_an_open_loop_concurrent_requests_have_different_tracks() -> None:
    records = [
        made_request(n, queue=None, sent_s=0.3 * n, ttft_s=0.1 + 0.2 * (n % 5)) for n in range(30)
    ]
    table = build_table(records)
    tracks = tracks_of(table)
    for row in range(30):
        for other in range(row):
            if tracks[row] == tracks[other]:
                assert table.ended_s[other] <= table.sent_s[row]
    in_flight = max(sum(1 for r in records if r.sent_s <= o.sent_s < r.ended_s) for o in records)
    assert tracks.max() == in_flight


def test_a_run_without_requests_has_no_stalls() -> None:
    assert stall_map([]).gap_ms.size == 0
