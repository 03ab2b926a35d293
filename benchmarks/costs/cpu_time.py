"""Divides the CPU time of a running server among the parts of a text's way.

The kernel counts the CPU time of each thread. py-spy looks at the threads' stacks, and a thread's
time is divided as the stacks are that it was seen with while it ran. The server runs as it is, with
nothing added to it. py-spy doesn't stop it, since threads that it stops look as if they ran.
"""

import re
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.costs.parts import UNSEEN, Frame, Role, part_of

PY_SPY: Final = Path(sys.executable).with_name("py-spy")
SAMPLES_PER_S: Final = 200
END_DEADLINE_S: Final = 30

_FRAME: Final = re.compile(r"(?P<function>.+) \((?P<path>.+):\d+\)")
_THREAD: Final = re.compile(r"thread \((?P<id>\d+)\)")

Part = tuple[Role, str]
Samples = Mapping[int, Counter[str]]
"""How often each part was seen, by thread."""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process of the server, and what it does."""

    role: Role
    process: psutil.Process


def processes_of(root: psutil.Process, model: str) -> list[ServerProcess]:
    """Return a server's processes.

    Args:
        root: The process that was started.
        model: The model's id, which names its replica.

    Raises:
        RuntimeError: There is not exactly one ingress and one replica.
    """
    found = [ServerProcess(_role(each, model), each) for each in (root, *root.children(True))]
    for role in ("ingress", "replica"):
        if sum(each.role == role for each in found) != 1:
            raise RuntimeError(f"the server has not exactly one {role}")
    return found


def _role(process: psutil.Process, model: str) -> Role:
    with suppress(psutil.NoSuchProcess):
        name, title = process.name(), " ".join(process.cmdline())
        if name == "haproxy":
            return "HAProxy"
        if title.startswith("ray::ServeReplica:"):
            return "replica" if title.split(":")[-1].startswith(model) else "ingress"
    return "Ray"


def thread_seconds(processes: Iterable[ServerProcess]) -> dict[tuple[Role, int], float]:
    """Return the CPU seconds that each thread has taken."""
    seconds: dict[tuple[Role, int], float] = {}
    for each in processes:
        with suppress(psutil.NoSuchProcess):  # Ray stops surplus workers
            for thread in each.process.threads():
                seconds[each.role, thread.id] = thread.user_time + thread.system_time
    return seconds


@contextmanager
def sampled(processes: Sequence[ServerProcess], folder: Path) -> Iterator[dict[Role, Samples]]:
    """Sample the ingress and the replica while the block runs; the dict is filled at its end.

    Args:
        processes: The server's.
        folder: Where py-spy writes its files.

    Raises:
        RuntimeError: py-spy fails; it may need the right to trace processes (SYS_PTRACE).
    """
    found: dict[Role, Samples] = {}
    watched = {each.role: each for each in processes if each.role in ("ingress", "replica")}
    samplers = {
        role: subprocess.Popen(
            [
                *(PY_SPY, "record", "--pid", str(each.process.pid)),
                *("--rate", str(SAMPLES_PER_S), "--duration", "unlimited"),
                *("--nonblocking", "--threads", "--function", "--full-filenames"),
                *("--format", "raw", "--output", folder / f"{role}.stacks"),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for role, each in watched.items()
    }
    try:
        yield found
    finally:
        for sampler in samplers.values():
            sampler.send_signal(signal.SIGINT)
        ends = {role: each.communicate(timeout=END_DEADLINE_S) for role, each in samplers.items()}
    for role, (_, errors) in ends.items():
        stacks = folder / f"{role}.stacks"
        if not stacks.exists():
            raise RuntimeError(f"py-spy can't sample the {role}: {errors.decode()[-500:]}")
        found[role] = samples_in(role, stacks.read_text(encoding="utf-8"))


def samples_in(role: Role, stacks: str) -> Samples:
    """Return the samples of a file in py-spy's raw format: one stack a line, and its count."""
    samples: dict[int, Counter[str]] = defaultdict(Counter)
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        thread, *frames = stack.split(";")
        if (known := _THREAD.match(thread)) is not None:
            part = part_of(role, [*_frames(frames)])
            samples[int(known["id"])][part] += int(count)
    return samples


def _frames(texts: Iterable[str]) -> Iterator[Frame]:
    for text in texts:
        if (found := _FRAME.fullmatch(text)) is not None:
            yield Frame(found["function"].rpartition(".")[-1], found["path"])


def divided(
    seconds: Mapping[tuple[Role, int], float], samples: Mapping[Role, Samples]
) -> dict[Part, float]:
    """Divide the threads' CPU seconds among the parts, each thread's as it was seen.

    Args:
        seconds: Of each thread, by its process's role.
        samples: Of the processes that were sampled.
    """
    parts: dict[Part, float] = defaultdict(float)
    for (role, thread), used in seconds.items():
        seen = samples.get(role, {}).get(thread, Counter[str]())
        if not seen:
            parts[role, UNSEEN[role]] += used
        for part, count in seen.items():
            parts[role, part] += used * count / seen.total()
    return dict(parts)
