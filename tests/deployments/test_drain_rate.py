from deployments.drain_rate import WINDOW_S, DrainRate


def test_the_rate_is_that_of_what_has_ended_since_it_got_busy() -> None:
    rate = DrainRate()
    rate.start(100.0)
    for at_s in (101.0, 102.0, 103.0, 104.0):
        rate.note_end(at_s)
    assert rate.seconds_for(1, 104.0) == 1.0
    assert rate.seconds_for(6, 108.0) == 12.0


def test_what_lies_outside_of_the_window_is_forgotten() -> None:
    rate = DrainRate()
    rate.start(0.0)
    for at_s in range(10):
        rate.note_end(float(at_s))
    rate.note_end(50.0)
    rate.note_end(55.0)
    assert rate.seconds_for(1, 60.0) == WINDOW_S / 2


def test_where_none_has_ended_one_takes_as_long_as_was_waited() -> None:
    rate = DrainRate()
    rate.start(10.0)
    assert rate.seconds_for(1, 10.0) == 0.0
    assert rate.seconds_for(2, 14.0) == 8.0
    assert rate.seconds_for(1, 10_000.0) == WINDOW_S


def test_an_idle_time_slows_nothing() -> None:
    rate = DrainRate()
    rate.start(0.0)
    rate.note_end(1.0)
    rate.start(20.0)
    rate.note_end(20.5)
    assert rate.seconds_for(1, 20.5) == 0.5


def test_a_replica_that_is_always_busy_and_never_asked_keeps_one_window() -> None:
    rate = DrainRate()
    rate.start(0.0)
    for at_s in range(10_000):
        rate.note_end(float(at_s))
    assert len(rate._ended_at_s) == WINDOW_S + 1
