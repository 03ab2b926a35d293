import csv
import json
from pathlib import Path

import pytest

from loadtest.report.report_files import write_all
from loadtest.results.run import read_run
from tests.loadtest.made_runs import made_level, sweep, write_run


def test_the_summary_keeps_the_run_and_gains_the_results(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sweep((1, 2)), {"slo": ["ttft:500"], "seed": 3})
    before = json.loads((run / "summary.json").read_text())
    results = write_all(run)
    after = json.loads((run / "summary.json").read_text())
    assert {key: after[key] for key in before} == before
    assert after["findings"] == list(results.findings)
    assert after["verdict"]["exit_code"] == 0
    assert [level["title"] for level in after["results"]] == ["1 user", "2 users"]


def test_writing_again_changes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [made_level(2)])
    write_all(run)
    first = {path.name: path.read_bytes() for path in run.iterdir()}
    write_all(run)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == first


def test_an_interrupted_run_stays_interrupted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [made_level(2)], status="running")
    assert write_all(run).status == "interrupted"
    assert write_all(run).status == "interrupted"


def test_the_csv_has_a_line_per_level_and_units_in_its_column_names(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sweep((1, 2, 4)))
    results = write_all(run)
    with (run / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["num_queues"] for row in rows] == ["1", "2", "4"]
    for row, level in zip(rows, results.results, strict=True):
        assert float(row["ttft_ms_p50"]) == level.window.distributions["ttft_ms"].p50
        assert float(row["output_tokens_per_s"]) == level.window.output_tokens_per_s
        assert row["ttft_ms_p99"] == ""


@pytest.mark.slow
def test_plots_are_drawn_only_on_request(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", sweep((1, 2)))
    write_all(run)
    assert not list(run.glob("*.png"))
    write_all(run, png=True)
    assert {path.name for path in run.glob("*.png")} == {"timelines.png", "load.png"}
    for path in run.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_an_analysed_run_can_be_read_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [made_level(2)])
    before = read_run(run)
    write_all(run)
    after = read_run(run)
    assert (after.levels, after.records) == (before.levels, before.records)
