"""Clients that read or send slowly while streams move: they get all, and others don't wait.

Those that vanish are in test_poison.py.
"""

from tests.faults.served.answer import assert_equal
from tests.faults.served.two_deaths import IN_HALVES, SLOW_READERS, TwoDeaths
from tests.measured import Record

MAX_GROWTH_BYTES = 100 * 2**20
MAX_MORE_FDS = 30


def test_slow_readers_get_all_of_their_answers(deaths: TwoDeaths) -> None:
    """The others had ended before one of them read on, so they did not wait."""
    answers = [deaths.answers[name] for name in SLOW_READERS]
    assert_equal(answers, [deaths.undisturbed[name] for name in SLOW_READERS])
    assert all(answer.lost_at for answer in answers)


def test_the_ingress_neither_grows_nor_keeps_files_open(deaths: TwoDeaths, record: Record) -> None:
    record("growth of the ingress, MiB", round(deaths.growth_bytes / 2**20, 1))
    assert deaths.growth_bytes < MAX_GROWTH_BYTES
    assert deaths.num_more_fds < MAX_MORE_FDS


def test_a_body_that_arrives_while_streams_move_is_answered(deaths: TwoDeaths) -> None:
    assert_equal([deaths.answers[IN_HALVES]], [deaths.undisturbed[IN_HALVES]])
