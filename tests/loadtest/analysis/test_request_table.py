import math

import pytest

from loadtest.analysis.request_table import build_table, tpot_ms
from loadtest.results.record import ErrorKind
from tests.loadtest.made_runs import made_request


def test_tpot_excludes_the_tokens_of_the_first_event() -> None:
    record = made_request(num_events=3, gap_s=0.1, tokens_per_event=2)
    assert tpot_ms(record) == pytest.approx(50.0)


def test_tpot_counts_one_token_for_a_first_event_of_unknown_tokens() -> None:
    record = made_request(num_events=3, gap_s=0.1).model_copy(update={"content_tokens": ()})
    assert tpot_ms(record) == pytest.approx(100.0)


def test_tpot_of_a_single_event_is_undefined() -> None:
    record = made_request(num_events=1, tokens_per_event=50)
    assert math.isnan(tpot_ms(record))
    uncounted = record.model_copy(update={"content_tokens": ()})
    assert math.isnan(tpot_ms(uncounted))


def test_gaps_are_pooled_over_successes_only() -> None:
    well = made_request(0, num_events=3, gap_s=0.1)
    failed = made_request(1, num_events=9, error=ErrorKind.TRUNCATED)
    table = build_table([failed, well])
    assert table.gap_ms.tolist() == pytest.approx([100.0, 100.0])
    assert [table.records[row].index for row in table.gap_request] == [0, 0]
    assert table.event_s.size == 12


def test_rows_are_in_sending_order() -> None:
    table = build_table([made_request(1, sent_s=2.0), made_request(0, sent_s=1.0)])
    assert [record.index for record in table.records] == [0, 1]


def test_a_request_without_error_and_content_is_not_a_success() -> None:
    assert not build_table([made_request(num_events=0)]).is_success.any()
