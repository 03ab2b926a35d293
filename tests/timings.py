"""A pytest plugin that shows where a run's time goes: `make test TIMINGS=1`.

It prints two tables after the run: tests, seconds of the worker and seconds of CPU by folder, and
the slowest fixtures. A folder's seconds include setup and teardown; seconds of CPU are those of the
worker and of all processes below it, such as Ray's.
"""

import os
import time
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path, PurePath
from typing import Any, Final

import pytest

NUM_FIXTURES: Final = 25
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
_fixtures_s: Final = defaultdict[str, float](float)
_last_cpu_s: list[float] = []


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Time a fixture's setup, which begins after those of the fixtures that it needs."""
    started = time.perf_counter()
    try:
        return (yield)
    finally:
        place = f"{fixturedef.baseid or 'plugin'}::{fixturedef.argname}"
        _fixtures_s[place] += time.perf_counter() - started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give a test's last report the CPU seconds since the last test, and its fixtures' seconds."""
    report = yield
    if report.when == "teardown":
        now = _cpu_s()
        cpu_s = max(now - _last_cpu_s[-1], 0) if _last_cpu_s else 0.0
        _last_cpu_s[:] = [now]
        # xdist sends all attributes of a report.
        vars(report).update(cpu_s=cpu_s, fixtures_s=dict(_fixtures_s))
        _fixtures_s.clear()
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print both tables."""
    by_folder = defaultdict[str, list[float]](lambda: [0, 0.0, 0.0])
    fixtures_s = defaultdict[str, float](float)
    for report in _reports(terminalreporter):
        row = by_folder[_folder(report.nodeid)]
        row[0] += report.when == "call" or (report.when == "setup" and report.skipped)
        row[1] += report.duration
        row[2] += getattr(report, "cpu_s", 0.0)
        for fixture, seconds in getattr(report, "fixtures_s", {}).items():
            fixtures_s[fixture] += seconds
    terminalreporter.section("time by folder")
    terminalreporter.line("| folder | tests | worker s | CPU s |")
    terminalreporter.line("|---|---|---|---|")
    total = [sum(column) for column in zip(*by_folder.values(), strict=True)] or [0, 0, 0]
    for folder, row in [*sorted(by_folder.items()), ("all", total)]:
        terminalreporter.line(f"| {folder} | {row[0]:.0f} | {row[1]:.0f} | {row[2]:.0f} |")
    terminalreporter.section("slowest fixtures")
    for fixture in sorted(fixtures_s, key=lambda name: -fixtures_s[name])[:NUM_FIXTURES]:
        terminalreporter.line(f"{fixtures_s[fixture]:8.1f} s {fixture}")


def _reports(terminalreporter: pytest.TerminalReporter) -> Iterator[Any]:
    for category in terminalreporter.stats.values():
        for report in category:
            if isinstance(report, pytest.TestReport):
                yield report


def _folder(nodeid: str) -> str:
    """Return the first two folders of a test, which are a room of the house."""
    folders = PurePath(nodeid.partition("::")[0]).parts[:-1]
    return "/".join(folders[:2])


def _cpu_s() -> float:
    """Return the CPU seconds of this process, of those below it, and of those that have ended."""
    times = os.times()
    total: float = times.user + times.system + times.children_user + times.children_system
    return total + sum(_cpu_s_of(child) for child in _below(os.getpid()))


def _below(pid: int) -> Iterator[int]:
    for task in _listed(Path(f"/proc/{pid}/task")):
        for child in _read(task / "children").split():
            yield int(child)
            yield from _below(int(child))


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # the process has just ended
        return []


def _cpu_s_of(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / _TICKS_A_SECOND


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # as above
        return ""
