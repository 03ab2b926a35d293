"""A server that a command starts in a folder of its own, as for users without a checkout."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from serve_app.commands.run.announcement import is_ready
from tests.ray.serve_run import WITH_SIGNALS, wait_until

DEADLINE_S = 400


@contextmanager
def started(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str], url: str
) -> Iterator[tuple[int, Path]]:
    """Wait until a server is ready, and stop it as Ctrl-C does.

    Yields:
        Its process, and the file of its output.
    """
    output = folder.with_name(f"{folder.name}.log")
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", WITH_SIGNALS, *map(str, command)],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: process.poll() is not None or is_ready(url), DEADLINE_S)
        assert process.poll() is None, output.read_text()
        yield process.pid, output
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(DEADLINE_S)


def streamed_answer(url: str) -> str:
    """Return the events of an answer of pydoc-chat."""
    question = {"role": "user", "content": "What does os.path.join do?"}
    body = {"model": "pydoc-chat", "stream": True, "messages": [question]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    return answer.text
