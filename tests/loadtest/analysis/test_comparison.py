from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from loadtest.analysis.comparison import Change, Comparison, ComparisonError, compare
from loadtest.results.record import ErrorKind, TokenSource
from loadtest.results.run import Run, read_run
from tests.loadtest.made_runs import made_level, write_run


def made_run(directory: Path, num_queues: int = 4, **level: Any) -> Run:
    configuration = level.pop("configuration", None)
    return read_run(
        write_run(directory, [made_level(num_queues, loops=25, **level)], configuration)
    )


def change_of(comparison: Comparison, figure: str) -> Change:
    (found,) = [d for d in comparison.changes if d.figure == figure]
    return found


def test_equal_runs_show_no_change(tmp_path: Path) -> None:
    comparison = compare(made_run(tmp_path / "a"), made_run(tmp_path / "b"))
    assert comparison.exit_code == 0
    assert {d.amount for d in comparison.changes} == {0.0}
    assert change_of(comparison, "TTFT p50").kind == "same"


def test_a_slower_run_is_a_regression(tmp_path: Path) -> None:
    comparison = compare(
        made_run(tmp_path / "a", ttft_s=0.5), made_run(tmp_path / "b", ttft_s=0.75)
    )
    found = change_of(comparison, "TTFT p95")
    assert (found.kind, comparison.exit_code) == ("worse", 99)
    assert found.amount == pytest.approx(0.5)
    assert found.interval is not None
    assert found.interval.low <= 0.5 <= found.interval.high
    assert comparison.sentence.startswith("REGRESSION in B: TTFT p50 at 4 users")


def test_a_faster_run_is_no_regression(tmp_path: Path) -> None:
    comparison = compare(
        made_run(tmp_path / "a", ttft_s=0.75), made_run(tmp_path / "b", ttft_s=0.5)
    )
    assert change_of(comparison, "TTFT p50").kind == "better"
    assert comparison.exit_code == 0


def test_less_output_is_worse_and_more_is_better(tmp_path: Path) -> None:
    slow, fast = made_run(tmp_path / "a", gap_s=0.2), made_run(tmp_path / "b", gap_s=0.1)
    assert change_of(compare(fast, slow), "Output").kind == "worse"
    assert change_of(compare(slow, fast), "Output").kind == "better"


def test_a_change_within_the_tolerance_is_no_regression(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a", ttft_s=0.5)
    second = made_run(tmp_path / "b", ttft_s=0.6)
    assert compare(first, second, tolerance=0.3).exit_code == 0
    assert compare(first, second, tolerance=0.05).exit_code == 99


def test_more_errors_are_a_regression(tmp_path: Path) -> None:
    level, records = made_level(4, loops=25)
    failing = [
        r.model_copy(update={"error": ErrorKind.HTTP_429}) if r.index % 2 else r for r in records
    ]
    first = read_run(write_run(tmp_path / "a", [(level, records)]))
    second = read_run(write_run(tmp_path / "b", [(level, failing)]))
    found = change_of(compare(first, second), "Error rate")
    assert (found.before, found.after, found.kind) == (0.0, 0.5, "worse")


def test_a_few_more_errors_are_a_regression_too(tmp_path: Path) -> None:
    level, records = made_level(4, loops=25)
    failing = [
        r.model_copy(update={"error": ErrorKind.HTTP_5XX}) if r.index < 5 else r for r in records
    ]
    first = read_run(write_run(tmp_path / "a", [(level, records)]))
    second = read_run(write_run(tmp_path / "b", [(level, failing)]))
    comparison = compare(first, second)
    assert change_of(comparison, "Error rate").kind == "worse"
    assert comparison.exit_code == 99


def test_a_stopped_run_is_remarked(tmp_path: Path) -> None:
    whole = made_run(tmp_path / "a")
    stopped = read_run(write_run(tmp_path / "b", [made_level(4, loops=25)], status="stopped"))
    assert compare(whole, whole).remarks == ()
    assert compare(whole, stopped).remarks == ("B did not run to its end (stopped).",)


def test_few_samples_have_no_interval_and_are_unknown(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a", 1, ttft_s=0.5)
    second = made_run(tmp_path / "b", 1, ttft_s=1.5)
    found = change_of(compare(first, second), "TTFT p95")
    assert (found.interval, found.kind) == (None, "unknown")


def test_comparing_twice_gives_the_same_intervals(tmp_path: Path) -> None:
    runs = made_run(tmp_path / "a"), made_run(tmp_path / "b", ttft_s=0.6)
    assert compare(*runs) == compare(*runs)


def test_different_token_sources_are_refused(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a")
    second = made_run(tmp_path / "b", source=TokenSource.CHUNKS)
    with pytest.raises(ComparisonError, match="different token sources"):
        compare(first, second)


def test_a_run_of_mixed_sources_is_refused(tmp_path: Path) -> None:
    level, records = made_level(2)
    mixed = [records[0].model_copy(update={"token_source": TokenSource.EVENTS}), *records[1:]]
    second = read_run(write_run(tmp_path / "b", [(level, mixed)]))
    with pytest.raises(ComparisonError, match="in different ways"):
        compare(made_run(tmp_path / "a"), second)


def test_runs_without_a_level_in_common_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ComparisonError, match="share no level: 2 users and 4 users"):
        compare(made_run(tmp_path / "a", 2), made_run(tmp_path / "b", 4))


def test_different_settings_are_remarked_and_everything_is_printed(tmp_path: Path) -> None:
    first = made_run(tmp_path / "a", configuration={"model": "[red]x"})
    comparison = compare(first, made_run(tmp_path / "b"))
    console = Console(record=True, width=160, file=(tmp_path / "out").open("w"))
    comparison.render(console)
    text = console.export_text()
    assert "model differs: '[red]x' and 'pydoc-chat'" in text
    assert "No regression in B" in text
    assert "TTFT p95" in text
    console.file.close()
