"""The one store of jobs: a folder with an SQLite database and the contents of files beside it.

All ingresses of a node share it: SQLite's write-ahead log lets them read and write at the same
time, but only on one machine, so the first node that opens the folder keeps others out. Every call
runs on a thread of the store's own, one for reads, one for writes and one that empties the log:
nothing here blocks the event loop.

What can't be opened, read or written is a `JobsUnavailableError`. The next call tries again, so a
repaired folder is used without a restart, and the rest of the server never depends on it.

Rows have an owner: the name of an API key, or "" without keys. No call finds another's.
"""

import asyncio
import json
import logging
import os
import secrets
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from platform import node as host_name
from typing import Final, TypeVar

from deployments.contract.errors import JobsUnavailableError
from serve_app.jobs.database import opened

T = TypeVar("T")

NODE_LEASE_S: Final = 30.0
"""How long after its last sign a node keeps the folder from others."""

NODE_RENEWAL_S: Final = 5.0

ORPHAN_AGE_S: Final = 3600.0
"""Contents without a row are erased when they are this old: a process died while it wrote them."""

ERASED_AT_ONCE: Final = 256
"""Rows that are erased in one transaction: leases are renewed between two."""

BUSY_CODES: Final = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)

logger = logging.getLogger("ray.serve")


def this_node() -> str:
    """Return what names this boot of this machine, the same in all of its containers."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return host_name()


@dataclass(frozen=True, slots=True)
class Page:
    """Which of an owner's rows a list shows.

    Attributes:
        after: The id of the row before the first; None begins with the first.
        limit: The most rows.
        is_descending: Whether the newest come first.
    """

    after: str | None
    limit: int
    is_descending: bool = True


class Store:
    """The folder, its database, and the threads that use them."""

    def __init__(
        self,
        folder: Path,
        unix_s: Callable[[], float] = time.time,
        node: str | None = None,
    ) -> None:
        """Name the folder; it is opened by the first call.

        Args:
            folder: Made if it is missing, but not its parents: a volume that is not mounted must
                not be taken for an empty store.
            unix_s: Returns the time.
            node: What names this machine; None asks it.
        """
        self.folder = folder
        self.contents = folder / "files"
        self.unix_s = unix_s
        self._node = node or this_node()
        self._node_until_s = 0.0
        self._reason: str | None = None
        self._reader = _Thread(self, "jobs-read")
        self._writer = _Thread(self, "jobs-write")
        self._emptier = _Thread(self, "jobs-empty-log")

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Return what a function reads, on the thread of reads.

        Raises:
            JobsUnavailableError: The store can't be read.
        """
        return await self._reader.run(work)

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run a function in one transaction, on the thread of writes; return its result.

        An exception of the function undoes what it wrote.

        Raises:
            JobsUnavailableError: The store can't be written.
        """

        def transaction(connection: sqlite3.Connection) -> T:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
            except BaseException:
                connection.rollback()
                raise
            connection.commit()
            return result

        return await self._writer.run(transaction)

    async def empty_log(self) -> None:
        """Move what SQLite's log holds into the database, and cut the log to nothing.

        That waits for transactions of all connections, and then for the disk, so it has a thread
        of its own. If they take too long, the log stays until the next time.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        await self._emptier.run(
            lambda connection: connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        )

    async def on_disk(self, work: Callable[[], T]) -> T:
        """Return what a function does with contents, on a thread of the event loop's pool.

        Raises:
            JobsUnavailableError: It raised an OSError.
        """

        def guarded() -> T:
            with self.guarding():
                return work()

        return await asyncio.to_thread(guarded)

    async def close(self) -> None:
        """Close the connections and end the threads."""
        for thread in (self._reader, self._writer, self._emptier):
            await thread.close()

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Turn errors of the disk and of SQLite into one that a client may read, and log it once.

        Raises:
            JobsUnavailableError: The block raised an OSError or an sqlite3.Error.
        """
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise self._unavailable(_reason_of(error)) from error
        self._reason = None

    def open(self) -> sqlite3.Connection:
        """Return a new connection, after the folder and the database are made and checked.

        Raises:
            JobsUnavailableError: Another node has the folder.
            OSError, sqlite3.Error: They can't be, or are not ours; see `guarding`.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _make_private(self.folder)
        self.keep_node()
        self.contents.mkdir(mode=0o700, exist_ok=True)
        return opened(self.folder / "jobs.sqlite")

    def keep_node(self) -> None:
        """Keep other nodes out of the folder for a while; harmless to repeat.

        Raises:
            JobsUnavailableError: Another node has it.
            OSError: The sign can't be read or written.
        """
        now_s = self.unix_s()
        if now_s < self._node_until_s - NODE_LEASE_S + NODE_RENEWAL_S:
            return
        sign = self.folder / "node"
        # A sign that can't be read, as a full disk may leave it, keeps nobody out.
        with suppress(FileNotFoundError, ValueError, TypeError, LookupError):
            found = json.loads(sign.read_bytes())
            if found["node"] != self._node and found["until_s"] > now_s:
                raise self._unavailable(
                    "another node uses the folder, and SQLite's log works on one machine only. "
                    "Let all ingresses run on one node"
                )
        self._node_until_s = now_s + NODE_LEASE_S
        new = self.folder / f"node.{secrets.token_hex(4)}"
        try:
            new.write_text(json.dumps({"node": self._node, "until_s": self._node_until_s}))
            new.replace(sign)
        except OSError:
            # A full disk takes the name of a file, and not what is in it.
            new.unlink(missing_ok=True)
            raise

    def _unavailable(self, reason: str) -> JobsUnavailableError:
        if reason != self._reason:
            logger.error("the store of jobs in %s can't be used: %s", self.folder, reason)
            self._reason = reason
        return JobsUnavailableError(f"The store of jobs can't be used: {reason}.")


class _Thread:
    """One thread with one connection, which is opened when it is first used, or after an error."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self._executor = ThreadPoolExecutor(1, name)
        self._connection: sqlite3.Connection | None = None

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, work)

    def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with self._store.guarding():
            try:
                if self._connection is None:
                    self._connection = self._store.open()
                self._store.keep_node()
                return work(self._connection)
            except (OSError, sqlite3.Error) as error:
                if getattr(error, "sqlite_errorcode", None) not in BUSY_CODES:
                    self._close()
                raise

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._executor, self._close)
        self._executor.shutdown(wait=False)

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def page_of(
    connection: sqlite3.Connection,
    table: str,
    owner: str,
    page: Page,
    purpose: str | None = None,
) -> tuple[list[sqlite3.Row], bool] | None:
    """Return an owner's rows of a page, and whether more follow; None if `after` is no row's id.

    Args:
        connection: The database.
        table: One of ours, whose rows have a number, an id and an owner.
        owner: Whose rows.
        page: Which of them.
        purpose: Only files of this purpose; None takes all rows.
    """
    sign, order = ("<", "DESC") if page.is_descending else (">", "ASC")
    conditions, values = ["owner = ?"], [owner]
    if page.after is not None:
        found = connection.execute(
            f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (page.after, owner)
        ).fetchone()
        if found is None:
            return None
        conditions.append(f"number {sign} ?")
        values.append(found["number"])
    if purpose is not None:
        conditions.append("purpose = ?")
        values.append(purpose)
    rows = connection.execute(
        f"SELECT * FROM {table} WHERE {' AND '.join(conditions)} ORDER BY number {order} LIMIT ?",
        (*values, page.limit + 1),
    ).fetchall()
    return rows[: page.limit], len(rows) > page.limit


def _make_private(folder: Path) -> None:
    """Take the folder from other users, if they may enter it.

    Raises:
        OSError: It is another user's.
    """
    if stat.S_IMODE(os.stat(folder).st_mode) & 0o077:
        os.chmod(folder, 0o700)


def _reason_of(error: OSError | sqlite3.Error) -> str:
    """Return in words what is wrong, without a path."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return str(error)
