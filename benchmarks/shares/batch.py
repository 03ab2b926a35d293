"""A batch of the server's under measurement, and the engine alone with texts like the batch's."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.cpu_shapes import CPU
from benchmarks.engine import encoded_chats, engine_speed
from benchmarks.shares.client import NUM_TOKENS, Client
from benchmarks.shares.server import NUM_SLOTS, secret_of
from deployments.engine.model.loader import load_model

KEY = "batch"
POLL_S = 0.05
DEADLINE_S = 60


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that runs."""

    id: str
    http: httpx.Client

    def shown(self) -> dict[str, Any]:
        """Return what the server tells of it."""
        found: dict[str, Any] = self.http.get(f"/v1/batches/{self.id}").json()
        return found

    @property
    def num_completed(self) -> int:
        """Lines that have an answer."""
        counts = self.shown()["request_counts"]
        assert not counts["failed"], "a line has failed"
        return int(counts["completed"])

    def wait_for(self, num_completed: int) -> None:
        """Wait until as many lines have an answer."""
        _until(lambda: self.num_completed >= num_completed)


@contextmanager
def running_batch(client: Client, num_lines: int, num_tokens: int) -> Iterator[Batch]:
    """Run a batch while the block does, and cancel it at its end.

    Args:
        client: Chooses the prompts, of lines 0 to `num_lines` - 1.
        num_lines: More than can be answered meanwhile.
        num_tokens: Of each answer.
    """
    lines = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": client.body(KEY, str(number), num_tokens=num_tokens),
        }
        for number in range(num_lines)
    )
    contents = "\n".join(map(json.dumps, lines)).encode()
    headers = {"Authorization": f"Bearer {secret_of(KEY)}"}
    with httpx.Client(base_url=client.url, headers=headers, timeout=DEADLINE_S) as http:
        file = http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", contents)}
        ).raise_for_status()
        made = http.post(
            "/v1/batches",
            json={
                "input_file_id": file.json()["id"],
                "endpoint": "/v1/chat/completions",
                "completion_window": "24h",
            },
        ).raise_for_status()
        batch = Batch(made.json()["id"], http)
        _until(lambda: batch.shown()["status"] == "in_progress")
        yield batch
        assert batch.shown()["status"] == "in_progress", "the batch has too few lines"
        http.post(f"/v1/batches/{batch.id}/cancel").raise_for_status()
        _until(lambda: batch.shown()["status"] == "cancelled")


def engine_speed_of(folder: Path, texts: Sequence[str]) -> float:
    """Return how many tokens a second the engine makes of texts, in this process.

    Args:
        folder: The model's.
        texts: The conversations' first messages.
    """
    loaded = load_model(str(folder), revision=None, dtype="auto", device=CPU)
    torch.set_num_threads(1)  # as the server's replica has
    return engine_speed(loaded, encoded_chats(loaded, texts), NUM_TOKENS, NUM_SLOTS)


def _until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"a batch is not where it should be after {DEADLINE_S} s")
        time.sleep(POLL_S)
