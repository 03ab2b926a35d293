"""The one command; `tests/serve_app/commands` and `tests/loadtest` test its parts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.cli import app as load_tester
from raystream.__main__ import app

HEAVY = {"ray", "torch", "starlette", "loadtest", "numpy", "aiohttp"}
"""None of these may make `raystream --help` slow."""

COMMANDS = ("run", "compare", "report", "mock")


def test_the_load_tester_s_commands_are_below_bench() -> None:
    assert "bench" in CliRunner().invoke(app, ["--help"]).stdout
    told = CliRunner().invoke(app, ["bench", "--help"])
    assert told.exit_code == 0
    assert all(f" {name} " in told.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_takes_what_it_takes_below_loadtest(name: str) -> None:
    ours = CliRunner().invoke(app, ["bench", name, "--help"])
    theirs = CliRunner().invoke(load_tester, [name, "--help"])
    assert ours.exit_code == theirs.exit_code == 0
    assert f"raystream bench {name}" in ours.stdout
    assert ours.stdout.splitlines()[3:] == theirs.stdout.splitlines()[3:]


def test_a_wrong_run_ends_with_the_load_tester_s_code() -> None:
    wrong = CliRunner().invoke(app, ["bench", "run"])
    assert (wrong.exit_code, wrong.stderr) == (2, "loadtest: URL is missing\n")
    unknown = CliRunner().invoke(app, ["bench", "ruin"])
    assert unknown.exit_code == 2
    assert "No such command 'ruin'" in unknown.stderr


def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom raystream.__main__ import app\n"
        "try: app(['--help'])\nexcept SystemExit: pass\n"
        f"print({HEAVY!r} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("raystream ben", {"bench"}),
        ("raystream bench m", {"mock"}),
        ("raystream new", {"new-config", "new-key"}),
    ],
)
def test_a_shell_completes_commands_also_below_bench(line: str, expected: set[str]) -> None:
    environment = {
        "_RAYSTREAM_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    told = CliRunner().invoke(app, [], prog_name="raystream", env=environment)
    assert set(told.stdout.split()) == expected


@pytest.mark.parametrize("name", ["deployments/__init__.py", "serve_app.py"])
def test_a_module_of_the_user_s_that_hides_one_of_ours_is_refused_in_one_line(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    started, imported = (
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        for code in ("from raystream.__main__ import app", "from raystream import Model")
    )
    hides = f"Error: {tmp_path / name} hides raystream's own package '"
    assert (started.returncode, imported.returncode) == (1, 1)
    assert started.stderr.startswith(hides)
    assert started.stderr.count("\n") == 1
    assert imported.stderr.splitlines()[-1].startswith(f"Import{hides}")


def test_whatever_lies_in_the_working_directory_python_m_finds_the_packages(tmp_path: Path) -> None:
    """Installed as a wheel does it: nothing but a `.pth` file or site-packages names the folder."""
    for name in ("serve_app", "deployments", "loadtest"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise AssertionError('the user's own')")
    started = subprocess.run(
        [sys.executable, "-m", "raystream", "--help"],
        env={each: value for each, value in os.environ.items() if each != "PYTHONPATH"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (started.returncode, started.stderr) == (0, "")
    assert "Usage: raystream" in started.stdout
