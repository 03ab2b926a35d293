"""aider: its command line, which asks, edits files in several forms and writes commit messages."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from steps import BASE_URL, LONG, MODEL, QUESTION, TOO_LONG, run

FILE = "joined.py"
OPTIONS = [
    "--openai-api-base",
    BASE_URL,
    "--openai-api-key",
    "none",
    "--yes-always",
    "--no-pretty",
    "--no-fancy-input",
    "--no-check-update",
    "--no-show-release-notes",
    "--no-show-model-warnings",
    "--no-suggest-shell-commands",
    "--no-detect-urls",
    "--analytics-disable",
]
AUTHOR = {
    f"GIT_{who}_{what}": "a@example.org"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


def aider(*arguments: str, model: str = MODEL, with_git: bool = False) -> str:
    """Run aider in a folder with one file; return what it says."""
    folder, environment = Path(tempfile.mkdtemp()), {**os.environ, **AUTHOR}
    (folder / FILE).write_text("import os\n")
    if with_git:
        for command in ("init -q", f"add {FILE}", "commit -q -m first"):
            subprocess.run(["git", *command.split()], cwd=folder, env=environment, check=True)
        (folder / FILE).write_text("import os.path\n")
    options = [*OPTIONS, "--model", f"openai/{model}", *([] if with_git else ["--no-git"])]
    done = subprocess.run(
        [Path(sys.executable).parent / "aider", *options, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    return told


def answered(told: str) -> None:
    """Check that the server answered: aider counts the tokens of an answer behind it."""
    assert "Tokens: " in told, told
    assert "litellm." not in told, told


def ask() -> None:
    answered(aider("--chat-mode", "ask", "--message", QUESTION))


def unstreamed() -> None:
    answered(aider("--chat-mode", "ask", "--no-stream", "--message", QUESTION))


def whole() -> None:
    answered(aider("--edit-format", "whole", "--message", QUESTION, FILE))


def diff() -> None:
    answered(aider("--edit-format", "diff", "--message", QUESTION, FILE, model=LONG))


def architect() -> None:
    told = aider("--architect", "--message", QUESTION, FILE, model=LONG)
    answered(told)


def commit() -> None:
    told = aider("--commit", FILE, with_git=True)
    assert "Commit " in told, told


def effort() -> None:
    answered(
        aider(
            "--chat-mode",
            "ask",
            "--reasoning-effort",
            "high",
            "--no-check-model-accepts-settings",
            "--message",
            QUESTION,
        )
    )


def too_long() -> None:
    told = aider("--chat-mode", "ask", "--message", TOO_LONG)
    assert "context window" in told, told


run(globals())
