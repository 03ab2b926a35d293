"""The results of lines: rows of the store until their batch has ended, and files from then on.

They count as stored bytes of their owner, who may have only so many: a batch whose results have no
room fails, and keeps those that it has. Rows of a batch that has ended are erased some at a time,
so that leases can be renewed in between.
"""

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from functools import partial
from typing import Final

from deployments.contract.errors import JobLimitError
from serve_app.config import JobsConfig
from serve_app.jobs.batch import Batch, BatchFaultError, Fault, Result
from serve_app.jobs.batches import held
from serve_app.jobs.files import stored_bytes
from serve_app.jobs.store import Store

RESULTS_BYTES: Final = 2**20
"""About how much of the results is read or erased at a time; a line's is read whole."""


class Results:
    """The results of all lines of batches that have not ended."""

    def __init__(self, store: Store, config: JobsConfig) -> None:
        self._store = store
        self._config = config

    async def done(self, batch: Batch) -> set[int]:
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
            BatchFaultError: The owner has no room for them; nothing was kept.
            LeaseLostError: The ingress holds it no longer; nothing was kept.
            JobsUnavailableError: The store can't be written; nothing was kept.
        """
        most = self._config.max_stored_bytes

        def record(connection: sqlite3.Connection) -> list[Result]:
            held(connection, ingress, batch)
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
                "UPDATE batches SET num_completed = num_completed + ?, "
                "num_failed = num_failed + ?, num_result_bytes = num_result_bytes + ? "
                "WHERE number = ?",
                (
                    len(kept) - num_failed,
                    num_failed,
                    sum(each.num_bytes for each in kept),
                    batch.number,
                ),
            )
            if kept and stored_bytes(connection, batch.owner) > most:
                raise BatchFaultError(
                    Fault(
                        JobLimitError.code,
                        f"With more results, the files and results would have more than {most} "
                        "bytes together, the most that are kept (jobs.max_stored_bytes). Delete "
                        "some files, and run the lines without a result as another batch.",
                    )
                )
            return kept

        return await self._store.write(record)

    async def note_loss(self, ingress: str, batch: Batch, line: int) -> int:
        """Note that replicas were lost with a line; return how often that has happened to it.

        Raises:
            LeaseLostError: The ingress holds the batch no longer.
            JobsUnavailableError: The store can't be written.
        """

        def note(connection: sqlite3.Connection) -> int:
            held(connection, ingress, batch)
            (number,) = connection.execute(
                "INSERT INTO losses (batch, line, number) VALUES (?, ?, 1) "
                "ON CONFLICT (batch, line) DO UPDATE SET number = number + 1 RETURNING number",
                (batch.number, line),
            ).fetchone()
            return int(number)

        return await self._store.write(note)

    async def lines(self, batch: Batch, *, errors: bool) -> AsyncIterator[bytes]:
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

    async def erase_ended(self) -> None:
        """Erase the rows of batches that have ended.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        for number in await self._store.read(_ended):
            while await self._store.write(partial(_erase_some, number=number)):
                pass


def _ended(connection: sqlite3.Connection) -> list[int]:
    """Return the numbers of batches that have ended, and of whose lines there are rows."""
    rows = connection.execute(
        # A step for each batch that has rows, not for each row.
        "WITH RECURSIVE some(batch) AS (SELECT min(batch) FROM results UNION ALL "
        "SELECT (SELECT min(batch) FROM results WHERE batch > some.batch) FROM some "
        "WHERE some.batch IS NOT NULL) SELECT batch FROM some WHERE batch IS NOT NULL AND batch "
        "NOT IN (SELECT number FROM batches WHERE expires_s IS NULL)"
    ).fetchall()
    return [row["batch"] for row in rows]


def _erase_some(connection: sqlite3.Connection, number: int) -> int:
    """Erase rows of a batch; return how many there were."""
    num_bytes = last = 0
    rows = connection.execute(
        "SELECT line, length(text) AS num_bytes FROM results WHERE batch = ? ORDER BY line",
        (number,),
    )
    with closing(rows):
        for row in rows:
            last = row["line"]
            num_bytes += row["num_bytes"]
            if num_bytes >= RESULTS_BYTES:
                break
    return connection.execute(
        "DELETE FROM results WHERE batch = ? AND line <= ?", (number, last)
    ).rowcount
