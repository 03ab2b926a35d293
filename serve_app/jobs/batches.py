"""Batches: their rows in the store, the states they pass through, and the results of their lines.

A batch is run by one ingress at a time, which holds its lease and renews it. If that ingress dies,
the lease runs out and another takes the batch over. A line's result and the batch's counts are
committed together, and only by the holder of the lease; the result's key is its line. So a line may
run twice, but has one result.
"""

import json
import secrets
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import chain
from types import MappingProxyType
from typing import Any, Final, Self

from deployments.contract.errors import JobConflictError, JobLimitError, JobNotFoundError
from serve_app.config import JobsConfig
from serve_app.jobs.files import StoredFile, no_file
from serve_app.jobs.store import Page, Store, page_of

LEASE_S: Final = 15.0
"""How long after its last sign an ingress keeps a batch. A pause of the process, or a slow disk,
takes it away too; that costs only that lines run again."""

RESULTS_BYTES: Final = 2**20
"""About how much of the results is read from the store at a time; a line's is read whole."""


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


class LeaseLostError(Exception):
    """Another ingress runs the batch now, or it has ended."""


class Batches:
    """The batches of all owners."""

    def __init__(self, store: Store, config: JobsConfig) -> None:
        self._store = store
        self._config = config

    async def create(self, asked: NewBatch) -> Batch:
        """Add a batch, to be run by whichever ingress claims it.

        Raises:
            JobNotFoundError: The owner has no such file.
            JobConflictError: The file holds the results of a batch.
            JobLimitError: The owner has too many batches.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def create(connection: sqlite3.Connection) -> Batch:
            file = connection.execute(
                "SELECT purpose FROM files WHERE id = ? AND owner = ?",
                (asked.input_file_id, asked.owner),
            ).fetchone()
            if file is None:
                raise no_file(asked.input_file_id, "input_file_id")
            if file["purpose"] != "batch":
                raise JobConflictError(
                    "The file holds the results of a batch; upload one with requests.",
                    "input_file_id",
                )
            (num_batches,) = connection.execute(
                "SELECT count(*) FROM batches WHERE owner = ?", (asked.owner,)
            ).fetchone()
            if num_batches >= self._config.max_num_batches:
                raise JobLimitError(
                    f"There are {num_batches} batches, and no more are kept "
                    "(jobs.max_num_batches). Each is erased jobs.expires_after_s after its end."
                )
            id_ = f"batch_{secrets.token_hex(16)}"
            connection.execute(
                "INSERT INTO batches (id, owner, tenant, endpoint, input_file_id, "
                "completion_window, metadata, status, moments, created_s, due_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, '{}', ?, ?)",
                (
                    id_,
                    asked.owner,
                    asked.tenant,
                    asked.endpoint,
                    asked.input_file_id,
                    asked.completion_window,
                    None if asked.metadata is None else json.dumps(dict(asked.metadata)),
                    Status.VALIDATING,
                    now_s,
                    now_s + asked.window_s,
                ),
            )
            return _found(connection, id_)

        return await self._store.write(create)

    async def find(self, owner: str, id_: str) -> Batch:
        """Return a batch.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobsUnavailableError: The store can't be read.
        """
        return await self._store.read(lambda connection: _of_owner(connection, owner, id_))

    async def page(self, owner: str, page: Page) -> tuple[list[Batch], bool]:
        """Return an owner's batches of a page, and whether more follow.

        Raises:
            JobNotFoundError: `page.after` is none of the owner's.
            JobsUnavailableError: The store can't be read.
        """
        found = await self._store.read(
            lambda connection: page_of(connection, "batches", owner, page)
        )
        if found is None:
            raise _no_batch(page.after or "", "after")
        rows, has_more = found
        return [Batch.of(row) for row in rows], has_more

    async def cancel(self, owner: str, id_: str) -> Batch:
        """Ask for a batch's end; the ingress that runs it, or another, writes its files.

        One that no ingress runs, and that has no results, ends at once.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobConflictError: It has ended, or is about to.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def cancel(connection: sqlite3.Connection) -> Batch:
            batch = _of_owner(connection, owner, id_)
            if batch.status is Status.CANCELLING:
                return batch
            if Status.CANCELLING not in NEXT.get(batch.status, ()):
                raise JobConflictError(f"The batch is {batch.status}, so it can't be cancelled.")
            batch = _moved(connection, batch, Status.CANCELLING, now_s)
            is_idle = connection.execute(
                "SELECT 1 FROM batches WHERE number = ? AND lease_until_s < ? "
                "AND num_completed + num_failed = 0",
                (batch.number, now_s),
            ).fetchone()
            if not is_idle:
                return batch
            connection.execute(
                "UPDATE batches SET expires_s = ?, lease_owner = NULL WHERE number = ?",
                (now_s + self._config.expires_after_s, batch.number),
            )
            return _moved(connection, batch, Status.CANCELLED, now_s)

        return await self._store.write(cancel)

    async def claim(
        self,
        ingress: str,
        beside: Mapping[str, str] = MappingProxyType({}),
        *,
        only_ending: bool = False,
    ) -> Batch | None:
        """Take the lease of a batch that no living ingress runs; None if there is none.

        The oldest is taken of an owner of whom this ingress runs the fewest.

        Args:
            ingress: Who takes it.
            beside: The batches that this ingress runs: their owners by their ids. None of them is
                taken, even if its lease has run out since it was renewed.
            only_ending: Whether to take only one whose lines need not run any more: it is
                cancelled or late, or all have run.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        now_s, owners = self._store.unix_s(), list(beside.values())

        def free(connection: sqlite3.Connection) -> list[sqlite3.Row]:
            rows = connection.execute(
                "SELECT id, owner FROM batches WHERE expires_s IS NULL AND lease_until_s < ? "
                "AND (NOT ? OR status IN (?, ?) OR due_s <= ?) ORDER BY number",
                (now_s, only_ending, Status.CANCELLING, Status.FINALIZING, now_s),
            ).fetchall()
            return [row for row in rows if row["id"] not in beside]

        if not await self._store.read(free):
            return None

        def claim(connection: sqlite3.Connection) -> Batch | None:
            rows = free(connection)
            if not rows:
                return None
            id_ = min(rows, key=lambda row: owners.count(row["owner"]))["id"]
            connection.execute(
                "UPDATE batches SET lease_owner = ?, lease_until_s = ? WHERE id = ?",
                (ingress, now_s + LEASE_S, id_),
            )
            return _found(connection, id_)

        return await self._store.write(claim)

    async def renew(self, ingress: str, ids: Sequence[str]) -> dict[str, Batch]:
        """Keep the leases of batches, and return by their ids those that the ingress still holds.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        until_s = self._store.unix_s() + LEASE_S

        def renew(connection: sqlite3.Connection) -> dict[str, Batch]:
            rows = connection.execute(
                "UPDATE batches SET lease_until_s = ? WHERE lease_owner = ? AND expires_s IS NULL "
                f"AND id IN ({', '.join('?' * len(ids))}) RETURNING *",
                (until_s, ingress, *ids),
            ).fetchall()
            return {row["id"]: Batch.of(row) for row in rows}

        return await self._store.write(renew)

    async def release(self, ingress: str) -> None:
        """Give up all leases of an ingress.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        await self._store.write(
            lambda connection: connection.execute(
                "UPDATE batches SET lease_owner = NULL, lease_until_s = 0 WHERE lease_owner = ?",
                (ingress,),
            )
        )

    async def begin(self, ingress: str, batch: Batch, num_lines: int) -> Batch:
        """Note how many lines a batch has; they run from now on.

        Raises:
            LeaseLostError: The ingress holds it no longer.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def begin(connection: sqlite3.Connection) -> Batch:
            held = _held(connection, ingress, batch)
            if held.status is not Status.VALIDATING:  # the client has cancelled it
                return held
            connection.execute(
                "UPDATE batches SET num_lines = ? WHERE number = ?", (num_lines, batch.number)
            )
            return _moved(connection, held, Status.IN_PROGRESS, now_s)

        return await self._store.write(begin)

    async def finalize(self, ingress: str, batch: Batch) -> Batch:
        """Note that all lines have results, if they do; return the batch as it is then.

        Raises:
            LeaseLostError: The ingress holds it no longer.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def finalize(connection: sqlite3.Connection) -> Batch:
            held = _held(connection, ingress, batch)
            num_done = held.num_completed + held.num_failed
            if held.status is not Status.IN_PROGRESS or num_done != held.num_lines:
                return held
            return _moved(connection, held, Status.FINALIZING, now_s)

        return await self._store.write(finalize)

    async def lines_done(self, batch: Batch) -> set[int]:
        """Return the numbers of the lines that have results.

        Raises:
            JobsUnavailableError: The store can't be read.
        """
        rows = await self._store.read(
            lambda connection: connection.execute(
                "SELECT line FROM results WHERE batch = ?", (batch.number,)
            ).fetchall()
        )
        return {row["line"] for row in rows}

    async def record(self, ingress: str, batch: Batch, results: Sequence[Result]) -> list[Result]:
        """Keep results, each unless its line has one; return those that were kept.

        Raises:
            LeaseLostError: The ingress holds it no longer; nothing was kept.
            JobsUnavailableError: The store can't be written; nothing was kept.
        """

        def record(connection: sqlite3.Connection) -> list[Result]:
            _held(connection, ingress, batch)
            kept = [
                each
                for each in results
                if connection.execute(
                    "INSERT OR IGNORE INTO results (batch, line, is_error, text) "
                    "VALUES (?, ?, ?, ?)",
                    (batch.number, each.line, each.is_error, each.text),
                ).rowcount
            ]
            num_failed = sum(each.is_error for each in kept)
            connection.execute(
                "UPDATE batches SET num_completed = num_completed + ?, num_failed = num_failed + ? "
                "WHERE number = ?",
                (len(kept) - num_failed, num_failed, batch.number),
            )
            return kept

        return await self._store.write(record)

    async def results(self, batch: Batch, *, errors: bool) -> AsyncIterator[bytes]:
        """Yield the lines of a batch's answers, or of its errors, some at a time, in line order.

        Raises:
            JobsUnavailableError: The store can't be read.
        """
        last = 0

        def some(connection: sqlite3.Connection) -> bytes:
            nonlocal last
            lines = bytearray()
            rows = connection.execute(
                "SELECT line, text FROM results WHERE batch = ? AND line > ? AND is_error = ? "
                "ORDER BY line",
                (batch.number, last, errors),
            )
            with closing(rows):
                for row in rows:
                    lines += f"{row['text']}\n".encode()
                    last = row["line"]
                    if len(lines) >= RESULTS_BYTES:
                        break
            return bytes(lines)

        while lines := await self._store.read(some):
            yield lines

    async def end(
        self,
        ingress: str,
        batch: Batch,
        status: Status,
        output: StoredFile | None = None,
        error: StoredFile | None = None,
        fault: Fault | None = None,
    ) -> None:
        """Note a batch's end with its files, whose contents are there, and drop its results.

        Raises:
            LeaseLostError: The ingress holds it no longer.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def end(connection: sqlite3.Connection) -> None:
            held = _held(connection, ingress, batch)
            if status not in NEXT[held.status]:
                raise LeaseLostError(f"it is {held.status}")
            for file in filter(None, (output, error)):
                file.insert(connection)
            connection.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ?, fault = ?, "
                "expires_s = ?, lease_owner = NULL WHERE number = ?",
                (
                    None if output is None else output.id,
                    None if error is None else error.id,
                    None if fault is None else json.dumps(asdict(fault)),
                    now_s + self._config.expires_after_s,
                    batch.number,
                ),
            )
            connection.execute("DELETE FROM results WHERE batch = ?", (batch.number,))
            _moved(connection, held, status, now_s)

        await self._store.write(end)

    async def expire(self) -> None:
        """Erase batches that ended long ago, and what SQLite's log still has of erased rows.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()
        await self._store.write(
            lambda connection: connection.execute(
                "DELETE FROM batches WHERE expires_s < ?", (now_s,)
            )
        )
        await self._store.read(
            lambda connection: connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        )


def _found(connection: sqlite3.Connection, id_: str) -> Batch:
    row = connection.execute("SELECT * FROM batches WHERE id = ?", (id_,)).fetchone()
    return Batch.of(row)


def _of_owner(connection: sqlite3.Connection, owner: str, id_: str) -> Batch:
    row = connection.execute(
        "SELECT * FROM batches WHERE id = ? AND owner = ?", (id_, owner)
    ).fetchone()
    if row is None:
        raise _no_batch(id_)
    return Batch.of(row)


def _held(connection: sqlite3.Connection, ingress: str, batch: Batch) -> Batch:
    """Return the batch as it is now.

    Raises:
        LeaseLostError: The ingress holds it no longer.
    """
    row = connection.execute(
        "SELECT * FROM batches WHERE number = ? AND lease_owner = ?", (batch.number, ingress)
    ).fetchone()
    if row is None:
        raise LeaseLostError("another ingress has it")
    return Batch.of(row)


def _moved(connection: sqlite3.Connection, batch: Batch, status: Status, now_s: float) -> Batch:
    """Move a batch to its next state, and return it."""
    assert status in NEXT[batch.status], f"{batch.status} does not lead to {status}"
    moments = json.dumps(dict(chain(batch.moments.items(), [(status.value, now_s)])))
    connection.execute(
        "UPDATE batches SET status = ?, moments = ? WHERE number = ?",
        (status, moments, batch.number),
    )
    return _found(connection, batch.id)


def _no_batch(id_: str, param: str | None = None) -> JobNotFoundError:
    return JobNotFoundError(f"There is no batch {id_[:64]!r}.", param)
