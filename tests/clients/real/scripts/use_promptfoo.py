"""promptfoo: an evaluation of two prompts."""

import json
import subprocess
import tempfile
from pathlib import Path

from steps import BASE_URL, MODEL, run


def evaluation() -> None:
    folder = Path(tempfile.mkdtemp())
    config = {
        "description": "Two prompts",
        "prompts": ["What does {{name}} do?", "Explain {{name}}."],
        "providers": [
            {
                "id": f"openai:chat:{MODEL}",
                "config": {"apiBaseUrl": BASE_URL, "apiKey": "none", "temperature": 0},
            }
        ],
        "tests": [
            {
                "vars": {"name": "os.path.join"},
                "assert": [{"type": "javascript", "value": "output.length > 0"}],
            }
        ],
    }
    (folder / "promptfooconfig.json").write_text(json.dumps(config))
    options = [
        "eval",
        "-c",
        "promptfooconfig.json",
        "-o",
        "result.json",
        "--no-cache",
        "--no-write",
    ]
    done = subprocess.run(
        ["promptfoo", *options],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    stats = json.loads((folder / "result.json").read_text())["results"]["stats"]
    assert stats["successes"] == 2, stats


run(globals())
