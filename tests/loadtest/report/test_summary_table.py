import io
from pathlib import Path

from rich.console import Console

from loadtest.report.summary_table import columns, render
from loadtest.results.record import LevelRecord, TokenSource
from tests.loadtest.analysis.figures import results_of
from tests.loadtest.made_runs import made_level, made_request, sweep


def test_a_sweep_fits_a_narrow_terminal(tmp_path: Path) -> None:
    output = io.StringIO()
    results = results_of(tmp_path, sweep((1, 2, 4, 8, 16)), slo=["ttft:500"])
    render(results, Console(file=output, width=80))
    text = output.getvalue()
    assert "…" not in text
    for level in results.results:
        assert level.title in text
    assert results.findings[0] in text


def test_columns_are_only_those_with_data(tmp_path: Path) -> None:
    plain = [c.title for c in columns(results_of(tmp_path / "a", [made_level(1)]).results)]
    assert "SLO met" not in plain
    assert "repeat" not in plain
    assert "steady tok/s" in plain
    levels = [made_level(1), made_level(1, index=1, started_s=30, repeat=1)]
    told = [c.title for c in columns(results_of(tmp_path / "b", levels, slo=["e2e:9"]).results)]
    assert {"SLO met", "repeat"} <= set(told)


def test_with_a_rate_latency_is_from_schedule(tmp_path: Path) -> None:
    level = LevelRecord(
        index=0, num_queues=None, rate_per_s=2, started_s=0, warm_s=0, deadline_s=9, ended_s=9
    )
    records = [made_request(queue=None, delay_s=2.0, ttft_s=0.5)]
    (figures,) = results_of(tmp_path, [(level, records)]).results
    (shown,) = [c for c in columns([figures]) if c.title == "TTFT from schedule p50, ms"]
    assert shown.value(figures) == "2,500"


def test_chunks_are_called_chunks(tmp_path: Path) -> None:
    results = results_of(tmp_path, [made_level(1, source=TokenSource.CHUNKS)]).results
    titles = [column.title for column in columns(results)]
    assert "chunks/s" in titles
    assert not [title for title in titles if "tok/s" in title]
