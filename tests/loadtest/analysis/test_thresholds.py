from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.analysis.metric import DISTRIBUTIONS, STATISTICS
from loadtest.analysis.objectives import Objective, ObjectiveError, parse_objective
from loadtest.analysis.thresholds import OPERATORS, ThresholdError, parse_threshold
from loadtest.results.record import ErrorKind
from loadtest.results.summary import Outcome
from tests.loadtest.analysis.figures import results_of
from tests.loadtest.made_runs import made_level
from tests.offenders import for_each


def verdict_on(directory: Path, *texts: str, **level: object) -> Outcome:
    return results_of(directory, [made_level(2, **level)], fail_if=list(texts)).verdict  # type: ignore[arg-type]  # any of made_level's


@given(
    st.sampled_from(list(DISTRIBUTIONS)),
    st.sampled_from(STATISTICS),
    st.sampled_from(list(OPERATORS)),
    st.integers(0, 10**6),
    st.sampled_from(["", " ", "  "]),
)
def test_every_figure_can_be_used_in_a_threshold(
    name: str, statistic: str, operator: str, limit: int, space: str
) -> None:
    read = parse_threshold(f"{name}.{statistic}{space}{operator}{space}{limit}")
    assert (read.name, read.statistic) == (name, statistic)
    assert (read.operator, read.limit) == (operator, float(limit))


def test_seconds_are_read_as_milliseconds() -> None:
    assert parse_threshold("e2e.p95 > 1.5s").limit == 1500.0


@for_each(
    ("latency.p95>1", "there are queue_delay.p95, ttft.p95"),
    ("ttft>1", "needs one of .p50"),
    ("ttft.p42>1", "needs one of .p50"),
    ("qps.p95<1", "leave out .p95"),
    ("qps<1s", "not a time"),
    ("ttft.p95=1", "write it as"),
    ("ttft.p95>-1", "write it as"),
    ("ttft.p95>1 or 1", "write it as"),
    ("__import__('os')", "write it as"),
    ("", "write it as"),
)
def test_an_invalid_expression_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(ThresholdError, match=message):
        parse_threshold(text)


@for_each("ttft", "ttft:", "ttft:-5", "ttft:inf", "ttft:nan", "nope:5")
def test_an_invalid_objective_is_refused(text: str) -> None:
    with pytest.raises(ObjectiveError):
        parse_objective(text)


def test_an_objective_is_parsed() -> None:
    assert parse_objective("ttft:2000") == Objective("ttft", 2000.0)


def test_a_run_within_its_thresholds_passes(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, "ttft.p95>2000", "error_rate>0.01", "e2e.max>60000")
    assert verdict.exit_code == 0
    assert len(verdict.sentences) == 3


def test_a_crossed_threshold_exits_with_99_and_shows_the_value(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, "ttft.p50>100", ttft_s=0.5, loops=1)
    assert verdict.exit_code == 99
    assert verdict.sentences == ("FAILED: ttft.p50 is 500 ms: ttft.p50>100.",)


def test_e2e_is_compared_in_milliseconds(tmp_path: Path) -> None:
    assert verdict_on(tmp_path, "e2e.p50>500", ttft_s=0.5).exit_code == 99


def test_an_unknown_figure_fails(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path, "ttft.p99>9000", loops=10)
    assert verdict.exit_code == 99
    assert "can't be checked with 20 successes" in verdict.sentences[0]


def test_any_level_can_cross_a_threshold(tmp_path: Path) -> None:
    levels = [made_level(1, ttft_s=0.1), made_level(2, index=1, started_s=20, ttft_s=3.0)]
    verdict = results_of(tmp_path, levels, fail_if=["ttft.p95>1000"]).verdict
    assert verdict.exit_code == 99
    assert verdict.sentences[0].startswith("FAILED: 2 users: ttft.p95 is")


def test_too_many_errors_exit_with_1_even_if_a_threshold_is_crossed(tmp_path: Path) -> None:
    level, records = made_level(1, loops=4)
    records[0] = records[0].model_copy(update={"error": ErrorKind.HTTP_5XX})
    strict = results_of(tmp_path / "a", [(level, records)], fail_if=["ttft.p50>1"]).verdict
    assert strict.exit_code == 1
    lenient = results_of(tmp_path / "b", [(level, records)], max_error_rate=0.25).verdict
    assert lenient.exit_code == 0


def test_a_run_without_success_exits_with_1_whatever_is_allowed(tmp_path: Path) -> None:
    level, records = made_level(1, loops=2, error=ErrorKind.CANCELLED)
    assert results_of(tmp_path, [(level, records)], max_error_rate=1.0).verdict.exit_code == 1


def test_a_run_that_sent_nothing_exits_with_1(tmp_path: Path) -> None:
    assert results_of(tmp_path, []).verdict.exit_code == 1


def test_a_run_that_ended_during_its_ramp_says_so(tmp_path: Path) -> None:
    level, records = made_level(2, loops=2)
    late = level.model_copy(update={"warm_s": level.ended_s + 1})
    verdict = results_of(tmp_path, [(late, records)]).verdict
    assert verdict.exit_code == 1
    assert "no request was sent after warm-up and ramp" in verdict.sentences[0]
