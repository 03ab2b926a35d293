from deployments.replica.retry_after import WINDOW_S, RetryEstimator


def test_the_rate_counts_ends_since_the_replica_became_busy() -> None:
    estimator = RetryEstimator()
    estimator.start(100.0)
    for at_s in (101.0, 102.0, 103.0, 104.0):
        estimator.note_end(at_s)
    assert estimator.seconds_for(1, 104.0) == 1.0
    assert estimator.seconds_for(6, 108.0) == 12.0


def test_ends_outside_the_window_are_forgotten() -> None:
    estimator = RetryEstimator()
    estimator.start(0.0)
    for at_s in range(10):
        estimator.note_end(float(at_s))
    estimator.note_end(50.0)
    estimator.note_end(55.0)
    assert estimator.seconds_for(1, 60.0) == WINDOW_S / 2


def test_if_none_has_ended_one_takes_as_long_as_the_replica_has_been_busy() -> None:
    estimator = RetryEstimator()
    estimator.start(10.0)
    assert estimator.seconds_for(1, 10.0) == 0.0
    assert estimator.seconds_for(2, 14.0) == 8.0
    assert estimator.seconds_for(1, 10_000.0) == WINDOW_S


def test_idle_time_does_not_count() -> None:
    estimator = RetryEstimator()
    estimator.start(0.0)
    estimator.note_end(1.0)
    estimator.start(20.0)
    estimator.note_end(20.5)
    assert estimator.seconds_for(1, 20.5) == 0.5


def test_a_replica_that_never_refuses_keeps_only_one_window() -> None:
    estimator = RetryEstimator()
    estimator.start(0.0)
    for at_s in range(10_000):
        estimator.note_end(float(at_s))
    assert len(estimator._ended_at_s) == WINDOW_S + 1
