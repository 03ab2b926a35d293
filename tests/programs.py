"""Programs outside Python that tests need, each by a mark that names it.

A test whose program is missing is skipped, but fails on CI, which installs all of them.
"""

import json
import os
import shutil
import subprocess
from functools import cache

import pytest

PROGRAMS = {
    "kubectl": "kubectl",
    "nginx": "nginx",
    "prometheus": "prometheus",
    "redis": "redis-server",
}
"""By the mark of the tests that need it."""

MIN_KUSTOMIZE = 5


def path_of(program: str) -> str | None:
    """Return where a program is; Debian puts nginx where a user's PATH does not look."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin")


@cache
def missing(program: str) -> str | None:
    """Return why tests can't use a program; None if they can."""
    if path_of(program) is None:
        return f"{program} is not installed"
    if program != "kubectl":
        return None
    command = ["kubectl", "version", "--client", "--output=json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    version: str = json.loads(output).get("kustomizeVersion", "v0")
    if int(version.removeprefix("v").split(".")[0]) >= MIN_KUSTOMIZE:
        return None
    return f"kubectl brings kustomize {version}; version {MIN_KUSTOMIZE} is needed"


def need_programs(item: pytest.Item) -> None:
    """Skip a test whose programs are missing, or fail it on CI."""
    marks = (mark for mark in PROGRAMS if item.get_closest_marker(mark))
    reasons = [reason for mark in marks if (reason := missing(PROGRAMS[mark]))]
    if reasons:
        (pytest.fail if "CI" in os.environ else pytest.skip)(", ".join(reasons))
