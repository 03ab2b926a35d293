import subprocess
import tomllib

import pytest
from packaging.requirements import Requirement

from benchmarks.serving.old_checkout import BASELINE, ROOT, old_checkout


def needed(project: str) -> set[str]:
    return {Requirement(each).name for each in tomllib.loads(project)["project"]["dependencies"]}


def test_the_baseline_runs_with_todays_packages() -> None:
    if not has_commit(BASELINE):
        pytest.skip("the clone lacks the commit")
    with old_checkout(BASELINE, "pyproject.toml", "benchmarks/instant_server.py") as old:
        before = needed((old / "pyproject.toml").read_text(encoding="utf-8"))
    assert before <= needed((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def has_commit(commit: str) -> bool:
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL).returncode == 0
