import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.analysis.request_table import build_table
from loadtest.report.time_lines import MAX_BINS, bin_width, time_lines
from tests.loadtest.made_runs import made_request


@given(st.floats(0.01, 1e6))
def test_bins_are_few_and_have_a_round_width(duration_s: float) -> None:
    width = bin_width(duration_s)
    assert duration_s / width <= MAX_BINS * 1.001
    assert float(f"{width:.6g}") == pytest.approx(width)
    assert f"{width:e}"[0] in "125"


def test_areas_under_the_lines_equal_the_totals() -> None:
    records = [made_request(n, sent_s=0.37 * n, num_events=7) for n in range(40)]
    lines = time_lines([build_table(records)], is_open_loop=False)
    in_flight_s = sum(record.ended_s - record.sent_s for record in records)
    assert lines.in_flight.sum() * lines.bin_s == pytest.approx(in_flight_s)
    assert lines.tokens_per_s.sum() * lines.bin_s == pytest.approx(7 * 40)


def test_a_ttft_is_shown_at_its_sending_time() -> None:
    records = [made_request(0, sent_s=1.0, ttft_s=0.5), made_request(1, sent_s=2.0, ttft_s=0.7)]
    lines = time_lines([build_table(records)], is_open_loop=False)
    assert lines.sent_s.tolist() == [1.0, 2.0]
    assert lines.ttft_ms.tolist() == pytest.approx([500.0, 700.0])
    assert np.all(lines.median_ttft_ms > 0)


def test_a_run_without_requests_has_lines() -> None:
    assert time_lines([], is_open_loop=True).in_flight.sum() == 0
