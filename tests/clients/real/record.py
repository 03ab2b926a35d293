"""Runs the clients' scripts through the recorder, and writes what they send to `recorded/`.

Run: python -m tests.clients.real.record SERVER_URL [CLIENT ...]
"""

import json
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.clients.real.environments import CLIENTS, programs_of
from tests.clients.real.isolation import run_isolated
from tests.clients.real.recorder import Recorded, recording

HERE = Path(__file__).parent
FOLDER = HERE.parent / "recorded"
WORDS = {"arguments", "content", "id", "prompt", "text", "tool_call_id"}


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What became of a client's script.

    Attributes:
        failures: The traceback of each step; None for a step that succeeded.
        requests: What the client sent.
    """

    failures: dict[str, str | None]
    requests: list[Recorded]


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


def write(client: str, requests: Iterable[Recorded]) -> None:
    """Write the first request of each step that has a shape of its own."""
    different: dict[str, Recorded] = {}
    for request in requests:
        shape = replace(request, body=without_words(request.body)).line()
        different.setdefault(shape, request)
    path_of(client).write_text("".join(f"{request.line()}\n" for request in different.values()))


def read(client: str) -> list[Recorded]:
    """Return what a client sent."""
    return [Recorded(**json.loads(line)) for line in path_of(client).read_text().splitlines()]


def main() -> None:
    """Record the clients that the command line names, or all."""
    server_url, *clients = sys.argv[1:]
    for client in clients or CLIENTS:
        run = run_script(client, server_url)
        write(client, run.requests)
        for step, failure in run.failures.items():
            last = failure.strip().splitlines()[-1] if failure else "ok"
            sys.stdout.write(f"{client} {step}: {last}\n")


if __name__ == "__main__":
    main()
