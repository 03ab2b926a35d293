"""Runs Codex against a server, over the WebSocket of `/v1/responses`, and reads what it tells."""

import json
from pathlib import Path
from typing import Any, Final

from tests.clients.real.environments import programs_of
from tests.clients.real.isolation import run_isolated

SETTINGS: Final = """\
model = "{model}"
model_provider = "raystream"

[model_providers.raystream]
name = "raystream"
base_url = "{url}/v1"
wire_api = "responses"
supports_websockets = true
request_max_retries = 0
stream_max_retries = 0
"""
TOOL: Final = "exec_command"
"""Codex's own, which runs a command in its sandbox."""


def told_by_codex(url: str, folder: Path, question: str, model: str = "m") -> list[dict[str, Any]]:
    """Let Codex ask one question; return the events that it prints.

    Args:
        url: The server's address.
        folder: For its settings and what it works on; it need not exist.
        question: What it is asked for.
        model: The model's id.
    """
    (folder / "work").mkdir(parents=True)
    # `HOME` is another folder in each run, so the settings have one of their own.
    (folder / "config.toml").write_text(SETTINGS.format(url=url, model=model))
    options = ["--json", "--skip-git-repo-check", "--sandbox", "read-only"]
    command = ["env", f"CODEX_HOME={folder}", "codex", "exec", *options, question]
    done = run_isolated(command, programs_of("codex"), folder / "work")
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
