"""Runs the clients' scripts through the recorder, and writes what they send to `recorded/`.

Run: python -m tests.clients.real.record [CLIENT ...]
"""

import json
import platform
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.clients.real.environments import CLIENTS, programs_of
from tests.clients.real.isolation import run_isolated
from tests.clients.real.recorder import Recorded, recording
from tests.clients.served_models import in_process
from tests.serve_app.local_server import local_server

HERE = Path(__file__).parent
FOLDER = HERE.parent / "recorded"
WORDS = {"arguments", "content", "id", "prompt", "text", "tool_call_id"}
MAX_TEXT_LENGTH = 400
"""Agents send prompts of 30,000 characters; a recording needs their shape."""
WHOLE_STEP = "too_long"
MACHINE = {
    re.compile(r"/tmp/tmp\w+"): "/project",
    re.compile(r"-tmp-tmp[\w-]+"): "-project",
    re.compile("/tmp/"): "/scratch/",
    re.compile(re.escape(platform.release())): "6.1.0",
}
"""What would show the machine that has recorded, and what stands for it."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What became of a client's script."""

    failures: dict[str, str | None]  # the traceback of each step; None for a step that succeeded
    requests: list[Recorded]  # what the client sent


def run_script(client: str, server_url: str) -> ScriptRun:
    """Run a client's script against a server, in a home of its own."""
    script = HERE / "scripts" / f"use_{client.replace('-', '_')}.py"
    with recording(server_url) as (url, recorder), tempfile.TemporaryDirectory() as folder:
        command = ["python", str(script), f"{url}/v1"]
        done = run_isolated(command, programs_of(client), Path(folder))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return ScriptRun(json.loads(done.stdout.strip().splitlines()[-1]), recorder.requests)


def path_of(client: str) -> Path:
    """Return the file with what a client sent."""
    return FOLDER / f"{client}.jsonl"


def without_words(body: Any) -> Any:
    """Return a body without the texts in which two requests of a step may differ."""
    if isinstance(body, list):
        return [without_words(value) for value in body]
    if isinstance(body, dict):
        return {
            name: None if name in WORDS and isinstance(value, str) else without_words(value)
            for name, value in body.items()
        }
    return body


def _recordable(value: Any, is_whole: bool) -> Any:
    """Return a body without traces of this machine, and with long texts cut unless it is whole."""
    if isinstance(value, list):
        return [_recordable(each, is_whole) for each in value]
    if isinstance(value, dict):
        return {
            name: each if name in ("arguments", "data", "url") else _recordable(each, is_whole)
            for name, each in value.items()
        }
    if not isinstance(value, str):
        return value
    for trace, replacement in MACHINE.items():
        value = trace.sub(replacement, value)
    return value if is_whole else value[:MAX_TEXT_LENGTH]


def write(client: str, requests: Iterable[Recorded]) -> None:
    """Write the first request of each step that has a shape of its own."""
    different: dict[str, Recorded] = {}
    for sent in requests:
        request = replace(sent, body=_recordable(sent.body, sent.step == WHOLE_STEP))
        shape = replace(request, body=without_words(request.body)).line()
        different.setdefault(shape, request)
    path_of(client).write_text("".join(f"{request.line()}\n" for request in different.values()))


def read(client: str) -> list[Recorded]:
    return [Recorded(**json.loads(line)) for line in path_of(client).read_text().splitlines()]


def main() -> None:
    """Record the clients that the command line names, or all."""
    with (
        tempfile.TemporaryDirectory() as folder,
        local_server(in_process(Path(folder))) as local,
        local.listening() as url,
    ):
        for client in sys.argv[1:] or CLIENTS:
            run = run_script(client, url)
            write(client, run.requests)
            for step, failure in run.failures.items():
                last = failure.strip().splitlines()[-1] if failure else "ok"
                sys.stdout.write(f"{client} {step}: {last}\n")


if __name__ == "__main__":
    main()
