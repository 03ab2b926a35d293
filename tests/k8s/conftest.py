import json
import os
import shutil
import subprocess
from functools import cache

import pytest


@cache
def _missing() -> str | None:
    if shutil.which("kubectl") is None:
        return "kubectl is not installed"
    command = ["kubectl", "version", "--client", "--output=json"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    version: str = json.loads(output).get("kustomizeVersion", "v0")
    if int(version.removeprefix("v").split(".")[0]) < 5:
        return f"kubectl brings kustomize {version}; version 5 is needed"
    return None


@pytest.fixture(autouse=True)
def _kubectl(request: pytest.FixtureRequest) -> None:
    """Skip tests if kubectl can't render here; fail on CI, which installs it."""
    reason = _missing() if request.node.get_closest_marker("kubectl") else None
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
