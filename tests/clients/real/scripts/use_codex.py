"""Codex: `codex exec`, which answers a question, and calls a tool on its way."""

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from steps import BASE_URL, LONG, MODEL, QUESTION, run

SETTINGS = f"""\
model_provider = "raystream"

[model_providers.raystream]
name = "raystream"
base_url = "{BASE_URL}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = 600000
"""


def events_of(model: str) -> list[dict[str, Any]]:
    """Ask a model; return what Codex tells of it."""
    folder = Path.home() / ".codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(f'model = "{model}"\n{SETTINGS}')
    options = ["--json", "--skip-git-repo-check", "--sandbox", "read-only"]
    done = subprocess.run(
        ["codex", "exec", *options, QUESTION],
        cwd=tempfile.mkdtemp(),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert events, done.stderr[-2000:]
    return events


def question() -> None:
    events = events_of(LONG)
    said = [event["item"] for event in events if event["type"] == "item.completed"]
    assert any(item["type"] == "agent_message" and item["text"] for item in said), events
    assert events[-1]["type"] == "turn.completed", events


def too_long() -> None:
    events = events_of(MODEL)
    assert events[-1]["type"] == "turn.failed", events
    assert "context window" in events[-1]["error"]["message"], events


run(globals())
