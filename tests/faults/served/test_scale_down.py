"""Replicas are taken away while streams run: the streams move before their replicas end."""

from tests.faults.served.answer import assert_equal
from tests.faults.served.replicas import is_alive
from tests.faults.served.scaled_down import NUM_REPLICAS, ScaledDown
from tests.measured import Record


def test_a_change_of_user_config_moves_nothing(scaled_down: ScaledDown) -> None:
    assert scaled_down.unchanged == scaled_down.used
    assert scaled_down.moved_early == []


def test_streams_of_replicas_that_are_scaled_down_move_once_and_are_equal(
    scaled_down: ScaledDown, record: Record
) -> None:
    assert_equal(scaled_down.answers, scaled_down.expected)
    assert len(scaled_down.used) == NUM_REPLICAS
    left, first = scaled_down.left, {runs[0] for runs in scaled_down.runs}
    # Requests go where their prompt's beginning is cached, so one of the replicas may get none.
    assert first <= set(scaled_down.used)
    assert first != {left}
    for answer, runs in zip(scaled_down.answers, scaled_down.runs, strict=True):
        assert runs == ([left] if runs[0] == left else [runs[0], left])
        assert len(answer.lost_at) == len(runs) - 1
    moved = [answer for answer in scaled_down.answers if answer.lost_at]
    moved_s = sorted(round(at - scaled_down.asked_s, 2) for a in moved for at in a.moved_at_s)
    record("seconds from the request to Serve until moved", moved_s)
    record("longest pause, s", round(max(each.longest_gap_s for each in moved), 2))


def test_replicas_that_are_scaled_down_end_before_their_streams(
    scaled_down: ScaledDown, record: Record
) -> None:
    assert not any(is_alive(each) for each in scaled_down.used if each != scaled_down.left)
    assert scaled_down.num_ended_streams == 0
    record("seconds until two of three replicas have ended", round(scaled_down.ended_s, 2))
