"""Runs a client's programs apart from this machine's settings."""

import os
import subprocess
import tempfile
from pathlib import Path

DEADLINE_S = 600
QUIET = {
    "AIDER_ANALYTICS_DISABLE": "true",
    "AIDER_CHECK_UPDATE": "false",
    "AIDER_SHOW_RELEASE_NOTES": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
    "PROMPTFOO_DISABLE_REMOTE_GENERATION": "1",
    "PROMPTFOO_DISABLE_TELEMETRY": "1",
    "PROMPTFOO_DISABLE_UPDATE": "1",
}
"""Keeps the clients from calling home."""

Finished = subprocess.CompletedProcess[str]


def run_isolated(command: list[str], programs: list[Path], folder: Path) -> Finished:
    """Run a command with an empty home, so that it finds no settings and leaves none.

    `programs` are the folders that are searched first, `folder` is the working directory.
    """
    path = ":".join([*map(str, programs), os.environ["PATH"]])
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            command,
            cwd=folder,
            env={"PATH": path, "HOME": home, "LANG": "C.UTF-8", **QUIET},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )
