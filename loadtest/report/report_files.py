"""The files made of a run: `summary.json` completed, `summary.csv`, `report.html`, plots.

All can be made again from `summary.json` and `requests.jsonl` at any time, and replace what was
there as a whole.
"""

import json
from pathlib import Path

from loadtest.analysis.run_results import Analysis, analyse
from loadtest.page.report_page import render_page
from loadtest.run import Run, read_run
from loadtest.run_files import SUMMARY_NAME, replace
from loadtest.summary import RunResults
from loadtest.summary_table import write_csv

__all__ = ["read_run", "write_all"]


def write_all(run_dir: Path, *, png: bool = False) -> RunResults:
    """Analyse a run and write all that tells of it.

    Args:
        run_dir: Holds `summary.json` and `requests.jsonl`.
        png: Whether to draw the plots as PNG, too.

    Raises:
        RunError: The files can't be read.
    """
    analysis = analyse(read_run(run_dir))
    _complete_summary(analysis.run, analysis.results)
    write_csv(run_dir / "summary.csv", analysis.results.results)
    replace(run_dir / "report.html", render_page(analysis))
    if png:
        _write_plots(run_dir, analysis)
    return analysis.results


def _write_plots(run_dir: Path, analysis: Analysis) -> None:
    # matplotlib takes half a second to import, and only plots need it.
    from loadtest.page.png_plots import write_plots

    write_plots(run_dir, analysis)


def _complete_summary(run: Run, results: RunResults) -> None:
    path = run.path / SUMMARY_NAME
    document = json.loads(path.read_text(encoding="utf-8"))
    document |= results.model_dump(mode="json")
    replace(path, json.dumps(document, indent=1) + "\n")
