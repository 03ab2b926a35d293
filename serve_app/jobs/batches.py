"""Batches: their rows in the store, which one an ingress claims next, and the states they pass.

A batch is run by the ingress that holds its lease (`leases`). Only that one may write what becomes
of the batch, or of its lines (`results`), and each such transaction checks it.
"""

import json
import secrets
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from itertools import chain
from types import MappingProxyType

from deployments.contract.errors import JobConflictError, JobLimitError, JobNotFoundError
from serve_app.config import JobsConfig
from serve_app.jobs.batch import NEXT, Batch, Fault, NewBatch, Status
from serve_app.jobs.files import StoredFile, no_file, stored_bytes
from serve_app.jobs.leases import FREE, LeaseLostError, Leases, free_at
from serve_app.jobs.store import ERASED_AT_ONCE, Page, Store, page_of


class Batches:
    """The batches of all owners.

    Attributes:
        leases: Which ingress runs which.
    """

    def __init__(self, store: Store, config: JobsConfig) -> None:
        self.leases = Leases(store, "batches", "expires_s IS NULL")
        self._store = store
        self._config = config

    async def create(self, asked: NewBatch) -> Batch:
        """Add a batch, to be run by whichever ingress claims it.

        Raises:
            JobNotFoundError: The owner has no such file.
            JobConflictError: The file holds the results of a batch.
            JobLimitError: The owner has too many batches, or no room for results.
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
            if stored_bytes(connection, asked.owner) >= self._config.max_stored_bytes:
                raise JobLimitError(
                    f"The files and results have {self._config.max_stored_bytes} bytes together, "
                    "the most that are kept (jobs.max_stored_bytes), so there is no room for the "
                    "results of a batch. Delete some files."
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
                f"SELECT 1 FROM batches WHERE number = ? AND {FREE} "
                "AND num_completed + num_failed = 0",
                (batch.number, *free_at(now_s)),
            ).fetchone()
            if not is_idle:
                return batch
            return self._ended(connection, batch, Status.CANCELLED, now_s)

        return await self._store.write(cancel)

    async def claim(
        self,
        ingress: str,
        beside: Mapping[str, str] = MappingProxyType({}),
        *,
        only_ending: bool = False,
        only_of: str | None = None,
    ) -> Batch | None:
        """Take the lease of a batch that no living ingress runs; None if there is none.

        It is the oldest of an owner of whom this ingress runs the fewest; of several such owners,
        of the one of whom no ingress has run a batch for the longest time.

        Args:
            ingress: Who takes it.
            beside: The batches that this ingress runs: their owners by their ids. None of them is
                taken, even if its lease has run out since it was renewed.
            only_ending: Whether to take only one whose lines need not run any more: it is
                cancelled or late, or all have run.
            only_of: The owner whose batch to take; None takes anyone's.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def free(connection: sqlite3.Connection) -> list[sqlite3.Row]:
            found = _free(connection, now_s, beside, only_ending=only_ending)
            return [row for row in found if only_of is None or row["owner"] == only_of]

        if not await self._store.read(free):
            return None

        def claim(connection: sqlite3.Connection) -> Batch | None:
            rows = free(connection)
            if not rows:
                return None
            return Batch.of(self.leases.take(connection, ingress, rows[0]["oldest"], now_s))

        return await self._store.write(claim)

    async def waiting(self, beside: Mapping[str, str]) -> list[str]:
        """Return the owners of batches that no ingress runs, in the order of their turns.

        Args:
            beside: See `claim`.

        Raises:
            JobsUnavailableError: The store can't be read.
        """
        now_s = self._store.unix_s()
        rows = await self._store.read(lambda connection: _free(connection, now_s, beside))
        return [row["owner"] for row in rows]

    async def begin(self, ingress: str, batch: Batch, num_lines: int) -> Batch:
        """Note how many lines a batch has; they run from now on.

        Raises:
            LeaseLostError: The ingress holds it no longer.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def begin(connection: sqlite3.Connection) -> Batch:
            found = held(connection, ingress, batch)
            if found.status is not Status.VALIDATING:  # the client has cancelled it
                return found
            connection.execute(
                "UPDATE batches SET num_lines = ? WHERE number = ?", (num_lines, batch.number)
            )
            return _moved(connection, found, Status.IN_PROGRESS, now_s)

        return await self._store.write(begin)

    async def finalize(self, ingress: str, batch: Batch) -> Batch:
        """Note that all lines have results, if they do; return the batch as it is then.

        Raises:
            LeaseLostError: The ingress holds it no longer.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def finalize(connection: sqlite3.Connection) -> Batch:
            found = held(connection, ingress, batch)
            num_done = found.num_completed + found.num_failed
            if found.status is not Status.IN_PROGRESS or num_done != found.num_lines:
                return found
            return _moved(connection, found, Status.FINALIZING, now_s)

        return await self._store.write(finalize)

    async def end(
        self,
        ingress: str,
        batch: Batch,
        status: Status,
        output: StoredFile | None = None,
        error: StoredFile | None = None,
        fault: Fault | None = None,
    ) -> None:
        """Note a batch's end with its files, whose contents are there.

        Its results are in them; their rows are erased by `Results.erase_ended`.

        Raises:
            LeaseLostError: The ingress holds it no longer.
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def end(connection: sqlite3.Connection) -> None:
            found = held(connection, ingress, batch)
            if status not in NEXT[found.status]:
                raise LeaseLostError(f"it is {found.status}")
            for file in filter(None, (output, error)):
                file.insert(connection)
            connection.execute(
                "UPDATE batches SET output_file_id = ?, error_file_id = ?, fault = ? "
                "WHERE number = ?",
                (
                    None if output is None else output.id,
                    None if error is None else error.id,
                    None if fault is None else json.dumps(asdict(fault)),
                    batch.number,
                ),
            )
            self._ended(connection, found, status, now_s)

        await self._store.write(end)

    async def expire(self) -> None:
        """Erase batches that ended long ago, and what SQLite's log still has of erased rows.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def some(connection: sqlite3.Connection) -> int:
            return connection.execute(
                "DELETE FROM batches WHERE number IN "
                "(SELECT number FROM batches WHERE expires_s < ? LIMIT ?)",
                (now_s, ERASED_AT_ONCE),
            ).rowcount

        while await self._store.write(some) == ERASED_AT_ONCE:
            pass
        await self._store.empty_log()

    def _ended(
        self, connection: sqlite3.Connection, batch: Batch, status: Status, now_s: float
    ) -> Batch:
        """Move a batch to its last state, and return it; no ingress holds it then."""
        connection.execute("DELETE FROM losses WHERE batch = ?", (batch.number,))
        connection.execute(
            "UPDATE batches SET expires_s = ?, lease_owner = NULL WHERE number = ?",
            (now_s + self._config.expires_after_s, batch.number),
        )
        return _moved(connection, batch, status, now_s)


def _free(
    connection: sqlite3.Connection,
    now_s: float,
    beside: Mapping[str, str],
    *,
    only_ending: bool = False,
) -> list[sqlite3.Row]:
    """Return the owners of batches that no ingress runs, and the number of the oldest of each.

    They are in the order in which `Batches.claim` takes them.
    """
    owners = list(beside.values())
    rows = connection.execute(
        f"SELECT owner, max(lease_until_s) AS served_s, min(CASE WHEN {FREE} "
        f"AND id NOT IN ({', '.join('?' * len(beside))}) "
        "AND (NOT ? OR status IN (?, ?) OR due_s <= ?) THEN number END) AS oldest "
        "FROM batches WHERE expires_s IS NULL GROUP BY owner HAVING oldest IS NOT NULL",
        (*free_at(now_s), *beside, only_ending, Status.CANCELLING, Status.FINALIZING, now_s),
    ).fetchall()
    return sorted(
        rows, key=lambda row: (owners.count(row["owner"]), row["served_s"], row["oldest"])
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


def held(connection: sqlite3.Connection, ingress: str, batch: Batch) -> Batch:
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
