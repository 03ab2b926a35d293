"""opencode: `opencode run`, which names the session and answers a question."""

import json
import subprocess
import tempfile
from pathlib import Path

from steps import BASE_URL, LONG, MODEL, QUESTION, run

SETTINGS = {
    "model": f"raystream/{LONG}",
    "small_model": f"raystream/{MODEL}",
    "share": "disabled",
    "autoupdate": False,
    "provider": {
        "raystream": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": BASE_URL, "apiKey": "none"},
            "models": {
                LONG: {"limit": {"context": 65536, "output": 200}},
                MODEL: {"limit": {"context": 2048, "output": 200}},
            },
        }
    },
}


def question() -> None:
    folder = Path(tempfile.mkdtemp())
    (folder / "opencode.json").write_text(json.dumps(SETTINGS))
    done = subprocess.run(
        ["opencode", "run", "--format", "json", QUESTION],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert any(event["type"] == "text" for event in events), events


run(globals())
