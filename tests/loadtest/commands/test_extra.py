"""The load tester in an environment that only serves, which lacks the extra `bench`."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from tests.loadtest.made_runs import made_level, write_run

ROOT = Path(__file__).resolve().parents[3]
EXTRA = ("jmespath", "matplotlib", "plotly")
PLOTLY = "loadtest: report.html needs plotly: pip install 'raystream[bench]'\n"
OTHERS = (
    "loadtest: --png needs matplotlib: pip install 'raystream[bench]'\n"
    "loadtest: --text-path needs jmespath: pip install 'raystream[bench]'\n"
)
WITHOUT = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRA!r}))
from loadtest.cli import app
app(sys.argv[1:])
"""


@pytest.fixture
def only_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in EXTRA:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("only_serving")
def test_a_run_is_refused_before_it_sends_anything(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["run", "http://h/v1/completions", "--out", str(tmp_path / "a")])
    assert (run.exit_code, run.stderr) == (2, PLOTLY)
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("only_serving")
def test_each_option_names_the_package_that_it_needs() -> None:
    custom = ["--api", "custom", "--body", "{}", "--text-path", "text"]
    run = CliRunner().invoke(app, ["run", "http://h/", "--png", *custom])
    assert (run.exit_code, run.stderr) == (2, PLOTLY + OTHERS)


@pytest.mark.usefixtures("only_serving")
def test_a_report_is_refused_and_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", [made_level(2)], status="running")
    before = {path.name: path.read_bytes() for path in run_dir.iterdir()}
    report = CliRunner().invoke(app, ["report", str(run_dir)])
    assert (report.exit_code, report.stderr) == (2, PLOTLY)
    assert {path.name: path.read_bytes() for path in run_dir.iterdir()} == before


@pytest.mark.slow
def test_what_needs_no_package_of_the_extra_works_without_it(tmp_path: Path) -> None:
    run_dir = str(write_run(tmp_path / "run", [made_level(2)]))
    command = [sys.executable, "-c", WITHOUT, "compare", run_dir, run_dir]
    compared = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert compared.returncode == 0, compared.stderr
    assert "No regression" in compared.stdout
