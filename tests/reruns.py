"""Runs failed tests once more if they may be starved, alone, after all others; shows each try.

Ray, HAProxy, browsers and vLLM's engines may be starved by other work on a machine, and so may
tests that wait on sockets while it stands still for seconds. Any other test in the suite's own
process has no such excuse and is never run again. A second failure is a failure. The
summary shows the first failure of each test that then passed, and ends with a line for each test
that ran again.

A failed test may leave sockets open, which is no fault of the next one that meets them.

`--rerun-starved` turns it on, as `make test` and `make test-vllm` do.
"""

import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

MAY_BE_STARVED = frozenset(
    {"ray", "browser", "kubectl", "prometheus", "nginx", "redis", "processes", "vllm", "in_time"}
)
"""The marks of tests with processes, or on sockets by the clock."""
MAX_FILES = 8
"""Failures in more files have one cause that a second try does not remove."""
DEADLINE_S = 600
FAILURES = ("failed", "error")
LAST_ERROR = ("last_exc", "last_type", "last_value", "last_traceback")
"""The names in `sys` by which pytest keeps a failed test's frames until the next test."""


@dataclass(frozen=True)
class Rerun:
    """A test that ran again."""

    reports: Sequence[pytest.TestReport]  # of the first try: those that failed
    has_passed: bool  # whether the second try passed
    output: str  # what pytest printed about the second try

    @property
    def nodeid(self) -> str:
        """The test."""
        return self.reports[0].nodeid

    @property
    def first_failure(self) -> str:
        """The line that says why the first try failed."""
        text = self.reports[0].longreprtext
        errors = [line for line in text.splitlines() if line.startswith("E ")]
        return (errors or text.splitlines() or ["no reason given"])[0].removeprefix("E").strip()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption(
        "--rerun-starved",
        action="store_true",
        help="run failed tests once more if they may be starved, alone, after all others",
    )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let what a failed test has left open end with it: a later one would be told of it."""
    num_failed = item.session.testsfailed
    result = yield
    if item.session.testsfailed > num_failed:
        for name in LAST_ERROR:
            vars(sys).pop(name, None)
        with warnings.catch_warnings(action="ignore"):
            gc.collect()
    return result


_reruns = pytest.StashKey[list[Rerun]]()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Run failed tests again, before the summary is printed; set the exit status by both tries."""
    config = session.config
    if hasattr(config, "workerinput") or not config.getoption("rerun_starved"):
        return
    terminal: pytest.TerminalReporter | None = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is None or session.exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    failed = _starved_failures(terminal)
    files = [list(of_file) for _, of_file in groupby(failed, lambda reports: reports[0].fspath)]
    if not files or len(files) > MAX_FILES:
        return
    terminal.write_line("")  # ends the line of dots
    reruns = config.stash[_reruns] = []
    for of_file in files:
        for reports in of_file:
            terminal.write_line(f"runs again, alone: {reports[0].nodeid}")
        reruns += _run_again(of_file, config)
    for rerun in reruns:
        if rerun.has_passed:
            _forgive(rerun, terminal)
    if not any(terminal.stats.get(category) for category in FAILURES):
        session.exitstatus = pytest.ExitCode.OK


def _starved_failures(terminal: pytest.TerminalReporter) -> list[list[pytest.TestReport]]:
    """Return the failed reports of tests that may be starved, by test, in their files' order."""
    found: dict[str, list[pytest.TestReport]] = {}
    for category in FAILURES:
        for report in terminal.stats.get(category, []):
            if isinstance(report, pytest.TestReport) and not MAY_BE_STARVED.isdisjoint(
                report.keywords
            ):
                found.setdefault(report.nodeid, []).append(report)
    return sorted(found.values(), key=lambda reports: reports[0].fspath)


def _run_again(
    failed: Sequence[Sequence[pytest.TestReport]], config: pytest.Config
) -> Iterator[Rerun]:
    """Run the failed tests of a file again, each given by the reports of its first failure."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        config.getoption("markexpr") or "",
        "--tb=long",
    ]
    command += [f"-p{plugin}" for plugin in config.getoption("plugins")]
    command += [f"-W{rule}" for rule in config.getoption("pythonwarnings") or ()]
    if (top := config.getoption("confcutdir")) is not None:
        command.append(f"--confcutdir={top}")
    command += [reports[0].nodeid for reports in failed]
    with TemporaryDirectory() as cache:
        has_ended, output = _output_of([*command, f"-ocache_dir={cache}"], config)
        told = Path(cache, "v/cache/lastfailed")
        failed_again = set(json.loads(told.read_text())) if told.exists() else set()
    for reports in failed:
        has_passed = has_ended and reports[0].nodeid not in failed_again
        yield Rerun(reports, has_passed, output)


def _output_of(command: Sequence[str], config: pytest.Config) -> tuple[bool, str]:
    """Return whether pytest ran all that it was to run, and what it printed."""
    try:
        run = subprocess.run(
            command,
            cwd=config.rootpath,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False, f"It did not end within {DEADLINE_S} s."
    return run.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), run.stdout


def _forgive(rerun: Rerun, terminal: pytest.TerminalReporter) -> None:
    """Count the test as run again instead of failed."""
    for category in FAILURES:
        kept = [each for each in terminal.stats.get(category, []) if each not in rerun.reports]
        terminal.stats[category] = kept
    terminal.stats.setdefault("rerun", []).append(rerun.reports[0])


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what ran again, and why."""
    reruns = config.stash.get(_reruns, [])
    if not reruns:
        return
    for rerun in reruns:
        if rerun.has_passed:
            terminalreporter.section(f"first failure of {rerun.nodeid}", sep="_")
            terminalreporter.write_line(rerun.reports[0].longreprtext)
        else:
            terminalreporter.section(f"second failure of {rerun.nodeid}", sep="_")
            terminalreporter.write_line(rerun.output)
    terminalreporter.section("tests that ran again")
    for rerun in reruns:
        ended = "passed" if rerun.has_passed else "FAILED again"
        terminalreporter.write_line(f"{ended}: {rerun.nodeid} (first: {rerun.first_failure})")
