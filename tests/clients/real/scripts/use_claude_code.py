"""Claude Code: `claude -p`, which answers a question, and calls a tool on its way."""

import json
import os
import subprocess
import tempfile
from urllib.parse import urljoin

from steps import BASE_URL, LONG, QUESTION, run

SETTINGS = {
    "ANTHROPIC_BASE_URL": urljoin(BASE_URL, "/"),
    "ANTHROPIC_API_KEY": "none",
    "ANTHROPIC_MODEL": LONG,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": LONG,
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "400",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "API_TIMEOUT_MS": "600000",
}


def question() -> None:
    done = subprocess.run(
        ["claude", "-p", "--output-format", "json", "--max-turns", "3", QUESTION],
        cwd=tempfile.mkdtemp(),
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert not told["is_error"], told
    assert told["result"], told


run(globals())
