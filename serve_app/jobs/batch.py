"""What a batch is: its states, its row as data, and what becomes of its lines."""

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Self


class Status(StrEnum):
    """What becomes of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    """It waits for an ingress, which counts its lines."""
    FAILED = "failed"
    """Its file, or its key, can't be used."""
    IN_PROGRESS = "in_progress"
    """Its lines run."""
    FINALIZING = "finalizing"
    """All lines have results, and the files are being written."""
    COMPLETED = "completed"
    EXPIRED = "expired"
    """Not all lines ran in time; the files have the results of those that did."""
    CANCELLING = "cancelling"
    """The client asked for its end; the files are being written."""
    CANCELLED = "cancelled"


NEXT: Final[Mapping[Status, tuple[Status, ...]]] = MappingProxyType(
    {
        Status.VALIDATING: (Status.IN_PROGRESS, Status.FAILED, Status.CANCELLING),
        Status.IN_PROGRESS: (
            Status.FINALIZING,
            Status.EXPIRED,
            Status.FAILED,
            Status.CANCELLING,
        ),
        Status.FINALIZING: (Status.COMPLETED,),
        Status.CANCELLING: (Status.CANCELLED,),
    }
)
"""All transitions; what is not a key has ended."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a batch has failed as a whole."""

    code: str
    message: str
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch.

    Attributes:
        number: Its row's; later batches have higher ones.
        id: Names it.
        owner: See `store`.
        tenant: Whose its requests are beside others; see `Standing`.
        endpoint: The path that all its lines ask.
        input_file_id: Its lines.
        completion_window: How long it may take, as the client wrote it.
        metadata: The client's own notes.
        status: Where it is.
        moments: When it came to each state, in Unix seconds.
        created_s: When it was created.
        due_s: When it expires if it has not ended.
        expires_s: When it is erased; None while it has not ended.
        num_lines: Its requests; 0 until they are counted.
        num_completed: Those with an answer.
        num_failed: Those with an error.
        num_result_bytes: Size of their results, as long as these are rows and not yet files.
        fault: Why it has failed.
        output_file_id: The answers, once it has ended and there are any.
        error_file_id: The errors, likewise.
    """

    number: int
    id: str
    owner: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Mapping[str, str] | None
    status: Status
    moments: Mapping[str, float]
    created_s: float
    due_s: float
    expires_s: float | None
    num_lines: int
    num_completed: int
    num_failed: int
    num_result_bytes: int
    fault: Fault | None
    output_file_id: str | None
    error_file_id: str | None

    @classmethod
    def of(cls, row: sqlite3.Row) -> Self:
        """Return the batch of a row."""
        found: dict[str, Any] = {each.name: row[each.name] for each in fields(cls)}
        found["status"] = Status(found["status"])
        found["moments"] = json.loads(found["moments"])
        found["metadata"] = found["metadata"] and json.loads(found["metadata"])
        found["fault"] = found["fault"] and Fault(**json.loads(found["fault"]))
        return cls(**found)

    @property
    def key(self) -> str:
        """The part of its id that names what is made of it."""
        return self.id.removeprefix("batch_")


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a line.

    Attributes:
        line: The line's number in its file, from 1.
        is_error: Whether it goes into the file of errors.
        text: The line of that file, without its end.
    """

    line: int
    is_error: bool
    text: str

    @property
    def num_bytes(self) -> int:
        """How much of a file it takes."""
        return len(self.text.encode()) + 1


@dataclass(frozen=True, slots=True)
class NewBatch:
    """What a client asks for; see `Batch`."""

    owner: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: float
    metadata: Mapping[str, str] | None


class BatchFaultError(Exception):
    """The batch fails as a whole; it keeps the results that it has.

    Attributes:
        fault: Why.
    """

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault
