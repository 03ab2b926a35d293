"""Tells the scheduler of sequences that failed in a worker, which has no way of its own to say so.

vLLM returns nothing but token ids from a step, and an exception in a worker ends the engine with
all its sequences. So the worker writes the request's id here before the step returns, and the
scheduler reads it before it looks at the step's tokens.

The record is a file in memory: a path reaches it from every process of the machine, and it ends
with the scheduler's process. A worker that Ray starts may be on another node, where the path leads
nowhere, or to a file of another process, which is left as it is.
"""

import json
import os

NAME = "raystream-failures"

UNUSABLE_LOGITS = "unusable logits"
"""The stop reason of a request that failed because no token could be chosen."""


class FailureRecord:
    """The ids of the requests that failed, as the scheduler's process reads them.

    Attributes:
        path: Where `report` writes; valid in every process of this user on this machine.
    """

    def __init__(self) -> None:
        """Start with no failure."""
        self._file = os.memfd_create(NAME)
        self._num_read = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    def take(self) -> set[str]:
        """Return the ids of the requests that failed since the last call; about a microsecond."""
        size = os.fstat(self._file).st_size
        if size == self._num_read:
            return set()
        lines = os.pread(self._file, size - self._num_read, self._num_read)
        self._num_read = size
        return {json.loads(line) for line in lines.splitlines()}

    def close(self) -> None:
        """Free the memory."""
        os.close(self._file)


def report(path: str, request_id: str) -> None:
    """Record that a request has failed.

    Raises:
        OSError: The scheduler has ended, or is on another machine.
    """
    if os.readlink(path) != f"/memfd:{NAME} (deleted)":
        raise FileNotFoundError(f"{path} is not the scheduler's")
    with open(path, "ab", buffering=0) as record:
        record.write(json.dumps(request_id).encode() + b"\n")
