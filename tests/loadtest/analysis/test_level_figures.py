import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.analysis.level_figures import distribution, level_figures
from loadtest.analysis.metric import DISTRIBUTIONS
from loadtest.analysis.objectives import Objective
from loadtest.analysis.request_table import build_table
from loadtest.results.record import ErrorKind, LevelRecord, RequestRecord, TokenSource
from loadtest.results.summary import LevelFigures
from tests.loadtest.analysis import slow_reference
from tests.loadtest.made_runs import made_level, made_request

MS = st.integers(0, 400).map(lambda ms: ms / 1000)


@st.composite
def queues_of_requests(draw: st.DrawFn) -> tuple[LevelRecord, list[RequestRecord]]:
    """Draw a closed loop of some queues, with every outcome of a request."""
    num_queues = draw(st.integers(1, 4))
    records: list[RequestRecord] = []
    for queue in range(num_queues):
        time = draw(MS)
        for _ in range(draw(st.integers(0, 5))):
            num_events = draw(st.integers(0, 4))
            times, now = [], time
            for _ in range(num_events):
                now += draw(MS)
                times.append(now)
            tokens = draw(st.lists(st.integers(1, 3), min_size=num_events, max_size=num_events))
            ended_s = now + draw(MS)
            record = RequestRecord(
                level=0,
                index=len(records),
                queue=queue,
                is_warmup=draw(st.booleans()) and time < 0.5,
                question=0,
                scheduled_s=time - draw(MS),
                sent_s=time,
                content_s=tuple(times),
                content_tokens=tuple(tokens),
                ended_s=ended_s,
                error=draw(st.sampled_from([None, None, None, *ErrorKind])),
                output_tokens=sum(tokens),
                token_source=TokenSource.USAGE,
            )
            records.append(record)
            time = ended_s + draw(MS)
    warm_s = draw(MS)
    level = LevelRecord(
        index=0,
        num_queues=num_queues,
        started_s=0.0,
        warm_s=warm_s,
        deadline_s=draw(st.none() | MS.map(lambda ms: warm_s + 5 * ms)),
        ended_s=max((r.ended_s for r in records), default=1.0),
    )
    return level, draw(st.permutations(records))


def figures_of(
    level: LevelRecord, records: list[RequestRecord], *objectives: Objective
) -> LevelFigures:
    return level_figures(level, build_table(records), objectives)


@given(queues_of_requests())
def test_counts_and_rates_equal_the_slow_reference(
    made: tuple[LevelRecord, list[RequestRecord]],
) -> None:
    level, records = made
    figures = figures_of(level, records)
    span = slow_reference.window(level, records)
    duration = span[1] - span[0]
    tried = slow_reference.attempts(records, span)
    assert (figures.window.started_s, figures.window.ended_s) == span
    assert figures.num_attempts == len(tried)
    assert figures.num_successes == len(slow_reference.successes(tried))
    assert figures.errors == slow_reference.errors(tried)
    assert figures.num_errors + figures.num_successes + figures.num_cancelled == len(tried)
    if duration <= 0:
        assert figures.window.qps is None
        return
    assert figures.window.qps == pytest.approx(
        slow_reference.ended_well_in(records, span) / duration
    )
    assert figures.window.output_tokens_per_s == pytest.approx(
        slow_reference.tokens_in(records, span) / duration
    )


@pytest.mark.slow
@given(queues_of_requests())
def test_percentiles_equal_the_slow_reference(
    made: tuple[LevelRecord, list[RequestRecord]],
) -> None:
    level, records = made
    figures = figures_of(level, records)
    tried = slow_reference.attempts(records, slow_reference.window(level, records))
    for name, metric in DISTRIBUTIONS.items():
        found = figures.window.distributions[metric.key]
        expected = slow_reference.samples(tried, name)
        assert found.n == len(expected)
        if expected:
            assert found.p50 == pytest.approx(slow_reference.percentile(expected, 50), abs=1e-9)
            assert found.p95 == pytest.approx(slow_reference.percentile(expected, 95), abs=1e-9)
            assert found.max == pytest.approx(max(expected), abs=1e-9)
        assert found.p99 is None


@given(queues_of_requests())
def test_the_steady_state_equals_the_slow_reference(
    made: tuple[LevelRecord, list[RequestRecord]],
) -> None:
    level, records = made
    figures = figures_of(level, records)
    span = slow_reference.window(level, records)
    expected = slow_reference.steady_duration(level, records, span)
    assert (figures.steady.duration_s if figures.steady else 0.0) == pytest.approx(expected)


@pytest.mark.slow
@given(queues_of_requests(), st.integers(1, 800), st.integers(1, 800))
def test_goodput_and_attainment_count_requests_that_met_every_objective(
    made: tuple[LevelRecord, list[RequestRecord]], ttft_ms: int, e2e_ms: int
) -> None:
    level, records = made
    objectives = Objective("ttft", ttft_ms + 0.5), Objective("e2e", e2e_ms + 0.5)
    figures = figures_of(level, records, *objectives)
    span = slow_reference.window(level, records)
    good = [
        r
        for r in slow_reference.successes(records)
        if (r.content_s[0] - r.sent_s) * 1000 <= ttft_ms + 0.5
        and (r.content_s[-1] - r.sent_s) * 1000 <= e2e_ms + 0.5
    ]
    tried = slow_reference.attempts(records, span)
    if tried:
        expected = len(slow_reference.attempts(good, span)) / len(tried)
        assert figures.slo_attainment == pytest.approx(expected)
    if span[1] > span[0]:
        expected = slow_reference.ended_well_in(good, span) / (span[1] - span[0])
        assert figures.window.goodput == pytest.approx(expected)


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1e6), min_size=100, max_size=300))
def test_p99_needs_100_samples(samples: list[float]) -> None:
    found = distribution(np.array(samples))
    assert found.p99 == pytest.approx(slow_reference.percentile(samples, 99))
    assert distribution(np.array(samples[:99])).p99 is None


def test_a_level_without_requests_has_no_figures() -> None:
    level = LevelRecord(index=0, num_queues=2, started_s=0, warm_s=0, ended_s=0)
    figures = figures_of(level, [])
    assert (figures.num_attempts, figures.error_rate, figures.window.qps) == (0, None, None)
    assert figures.steady is None


def test_cancelled_requests_are_not_errors_but_meet_no_objective() -> None:
    level, records = made_level(1, loops=3)
    records.append(made_request(8, sent_s=0.1, error=ErrorKind.TRUNCATED))
    records.append(made_request(9, sent_s=0.1, error=ErrorKind.CANCELLED))
    figures = figures_of(level, records, Objective("ttft", 10_000))
    assert (figures.num_cancelled, figures.num_errors, figures.error_rate) == (1, 1, 0.25)
    assert figures.slo_attainment == 0.6


def test_a_failed_request_has_no_latency_but_its_tokens_count() -> None:
    level, records = made_level(1, loops=1, num_events=10)
    records.append(made_request(1, sent_s=0.0, num_events=3, error=ErrorKind.TRUNCATED))
    figures = figures_of(level, records)
    assert figures.window.distributions["ttft_ms"].n == 1
    duration = records[0].ended_s
    assert figures.window.output_tokens_per_s == pytest.approx(13 / duration)


def test_mixed_token_sources_leave_no_token_figures() -> None:
    level, records = made_level(1, loops=2)
    records.append(made_request(9, sent_s=0.1, source=TokenSource.CHUNKS))
    figures = figures_of(level, records)
    assert figures.token_source is None
    assert figures.window.output_tokens_per_s is None
    assert "tpot_ms" not in figures.window.distributions
    assert figures.window.distributions["ttft_ms"].n == 3


def test_chunks_are_not_called_tokens_even_without_a_success() -> None:
    level, records = made_level(2, loops=2, error=ErrorKind.TRUNCATED, source=TokenSource.CHUNKS)
    assert figures_of(level, records).token_word == "chunks"
    mixed = [*records, made_request(9, error=ErrorKind.TRUNCATED, source=TokenSource.USAGE)]
    assert figures_of(level, mixed).window.output_tokens_per_s is None


def test_the_window_of_a_level_stopped_before_its_deadline_ends_at_the_stop() -> None:
    level, records = made_level(2, loops=2)
    stopped = level.model_copy(update={"deadline_s": 60.0, "was_stopped": True})
    assert figures_of(stopped, records).window.ended_s == level.ended_s
    assert figures_of(level.model_copy(update={"deadline_s": 60.0}), records).window.ended_s == 60


def test_with_a_rate_objectives_count_from_the_scheduled_time() -> None:
    record = made_request(queue=None, delay_s=3.0, ttft_s=0.5)
    level = LevelRecord(index=0, num_queues=None, rate_per_s=2.0, started_s=0, warm_s=0, ended_s=2)
    assert figures_of(level, [record], Objective("ttft", 1000)).slo_attainment == 0.0
    assert figures_of(level, [record], Objective("ttft", 3600)).slo_attainment == 1.0


def test_queues_without_pauses_stay_in_the_steady_state() -> None:
    level, records = made_level(3, loops=5)
    steady = figures_of(level, records).steady
    assert steady is not None
    assert steady.duration_s == pytest.approx(level.ended_s)


def test_the_cached_share_covers_only_requests_that_report_it() -> None:
    level, records = made_level(1, loops=2)
    records[0] = records[0].model_copy(update={"cached_tokens": 10})
    assert figures_of(level, records).cached_share == 0.5


def test_unsent_requests_count_as_missed_objectives() -> None:
    level, records = made_level(1, loops=3)
    short = level.model_copy(update={"num_unsent": 3})
    figures = figures_of(short, records, Objective("ttft", 10_000))
    assert (figures.num_attempts, figures.num_unsent, figures.slo_attainment) == (3, 3, 0.5)
