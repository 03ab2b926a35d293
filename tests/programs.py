"""Programs outside Python that tests need, each by a mark that names it.

A test whose program is missing is skipped, and the end of the run names the Debian package that
brings it. On CI, which installs all of them, such a test fails.
"""

import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

MIN_KUSTOMIZE = 5
_MARK = "needs a program: "


@dataclass(frozen=True)
class Program:
    names: tuple[str, ...]  # what its executable may be called
    package: str  # the Debian package that brings it

    @property
    def path(self) -> str | None:
        """Where it is; Debian puts nginx where a user's PATH does not look."""
        found = (shutil.which(name) or shutil.which(name, path="/usr/sbin") for name in self.names)
        return next(filter(None, found), None)


PROGRAMS = {
    "browser": Program(("chromium", "google-chrome"), "chromium"),
    "kubectl": Program(("kubectl",), "kubectl, or kubernetes-client"),
    "nginx": Program(("nginx",), "nginx-light"),
    "prometheus": Program(("prometheus",), "prometheus"),
    "redis": Program(("redis-server",), "redis-server"),
}
"""By the mark of the tests that need it."""


def path_of(mark: str) -> str | None:
    """Return where the program of a mark is; None if it is not installed."""
    return PROGRAMS[mark].path


@cache
def missing(mark: str) -> str | None:
    """Return why tests can't use the program of a mark; None if they can."""
    program = PROGRAMS[mark]
    if program.path is None:
        return f"{program.names[0]} is not installed (Debian's package: {program.package})"
    if mark != "kubectl":
        return None
    command = [program.path, "version", "--client", "--output=json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    version: str = json.loads(output).get("kustomizeVersion", "v0")
    if int(version.removeprefix("v").split(".")[0]) >= MIN_KUSTOMIZE:
        return None
    return f"kubectl brings kustomize {version}; version {MIN_KUSTOMIZE} is needed"


def need_programs(item: pytest.Item) -> None:
    """Skip a test whose programs are missing, or fail it on CI."""
    marks = (mark for mark in PROGRAMS if item.get_closest_marker(mark))
    reasons = [reason for mark in marks if (reason := missing(mark))]
    if reasons:
        (pytest.fail if "CI" in os.environ else pytest.skip)(_MARK + ", ".join(reasons))


def show_missing(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what could not run here, and which package brings it."""
    skipped = Counter(
        report.longrepr[2].partition(_MARK)[2]
        for report in terminalreporter.getreports("skipped")
        if isinstance(report.longrepr, tuple) and _MARK in report.longrepr[2]
    )
    if skipped:
        terminalreporter.section("tests that could not run here")
    for reason, number in sorted(skipped.items()):
        terminalreporter.write_line(f"{number} tests: {reason}")
