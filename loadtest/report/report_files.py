"""Writes the files of an analysed run: `summary.json`, `summary.csv`, `report.html` and plots.

All of them can be made again from `summary.json` and `requests.jsonl`, and replace the old files.
"""

import json
from pathlib import Path

from loadtest.analysis.run_results import Analysis, analyse
from loadtest.report.report_page import render_page
from loadtest.report.summary_table import write_csv
from loadtest.results.run import Run, read_run
from loadtest.results.run_files import SUMMARY_NAME, replace
from loadtest.results.summary import RunResults


def write_all(run_dir: Path, *, png: bool = False) -> RunResults:
    """Analyse a run and write its files.

    Args:
        run_dir: The directory of `summary.json` and `requests.jsonl`.
        png: Whether to draw plots as PNG too.

    Raises:
        RunError: The run can't be read.
    """
    analysis = analyse(read_run(run_dir))
    _complete_summary(analysis.run, analysis.results)
    write_csv(run_dir / "summary.csv", analysis.results.results)
    replace(run_dir / "report.html", render_page(analysis))
    if png:
        _write_plots(run_dir, analysis)
    return analysis.results


def _write_plots(run_dir: Path, analysis: Analysis) -> None:
    # matplotlib, of the extra `bench`, takes half a second to import, and only plots need it.
    from loadtest.report.png_plots import write_plots

    write_plots(run_dir, analysis)


def _complete_summary(run: Run, results: RunResults) -> None:
    path = run.path / SUMMARY_NAME
    document = json.loads(path.read_text(encoding="utf-8"))
    document |= results.model_dump(mode="json")
    replace(path, json.dumps(document, indent=1) + "\n")
