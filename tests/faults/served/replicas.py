"""The model's replicas from outside: which process runs what, and how to harm it."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

DEADLINE_S = 180
"""For conditions on the server. A replica starts in about 8 s, or in a minute on a busy machine."""

POLL_S = 0.01

FOLDER = "RAYSTREAM_TEST_FAULTS_FOLDER"
"""The environment variable with the folder that replicas write to."""

RELEASED = "released"
"""The folder in it where tests write what may run at full speed."""

STOPPED = "stopped"
"""The folder in it where vLLM's replicas write which sequences they have stopped."""

USED_MEMORY = "used_memory"
"""The file in it with the part of the machine's memory that replicas take for used; none is 0."""


async def reached(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> float:
    """Wait until a condition holds; return the seconds that took."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    while not condition():
        assert loop.time() - started < deadline_s, f"not within {deadline_s} s"
        # The condition is another process's state, so this polls.
        await asyncio.sleep(POLL_S)
    return loop.time() - started


@dataclass(frozen=True)
class Replicas:
    """The replicas of one model, by the files that `FragileGenerator` writes."""

    folder: Path

    @classmethod
    def watched_in(cls, folder: Path) -> Self:
        """Make the folders that replicas write to."""
        for name in ("runs", "replicas", "faults", "broken", RELEASED, STOPPED):
            (folder / name).mkdir(parents=True)
        return cls(folder)

    @property
    def alive(self) -> list[int]:
        """The processes whose models are loaded, the oldest first."""
        named = sorted((self.folder / "replicas").iterdir(), key=lambda path: int(path.name))
        return [int(path.name) for path in named if _lives(path)]

    @property
    def broken(self) -> list[str]:
        """The invariants that engines have broken."""
        return [path.read_text() for path in (self.folder / "broken").iterdir()]

    def runs_of(self, request_id: str) -> list[int]:
        """Return the processes that a request was sent to, in order."""
        path = self.folder / "runs" / request_id
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def has_failed(self, request_id: str) -> bool:
        """Whether a request has made its engine fail."""
        return (self.folder / "faults" / request_id).exists()

    def counts_of(self, process_id: int) -> dict[str, int]:
        """Return a process's latest counts."""
        counts: dict[str, int] = json.loads(
            (self.folder / "replicas" / str(process_id)).read_text()
        )
        return counts

    def num_stopped(self, name: str) -> int:
        """Return how many sequences have stopped whose ids begin with a name."""
        stopped = (self.folder / STOPPED).iterdir()
        return sum(path.name.partition("-")[2].startswith(f"{name}-") for path in stopped)

    def release(self, name: str) -> None:
        """Let requests run at full speed whose ids begin with `held-NAME-`."""
        (self.folder / RELEASED / name).touch()

    def hold(self, name: str) -> None:
        """Slow down again what was released."""
        (self.folder / RELEASED / name).unlink()

    def use_memory(self, part: float) -> None:
        """Let replicas believe that so much of the machine's memory is in use, from 0 to 1."""
        draft = self.folder / f"{USED_MEMORY}.draft"
        draft.write_text(str(part))
        draft.replace(self.folder / USED_MEMORY)

    @property
    def are_idle(self) -> bool:
        """Whether no living replica holds a sequence or a permit."""
        return all(not any(self.counts_of(process_id).values()) for process_id in self.alive)

    async def complete(self, num_replicas: int) -> None:
        """Wait until as many replicas live as are configured."""
        await reached(lambda: len(self.alive) >= num_replicas)


def _lives(path: Path) -> bool:
    """Whether the process that writes a file lives; its id may be another process's by now."""
    try:
        began_s = psutil.Process(int(path.name)).create_time()
    except psutil.NoSuchProcess:
        return False
    return began_s <= path.stat().st_mtime and is_alive(int(path.name))


def is_alive(process_id: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(process_id: int) -> None:
    """End a process at once."""
    os.kill(process_id, signal.SIGKILL)
