"""Files of clients: a row in the store for each, and its contents beside the database.

Contents are there before their row, and are erased after it; so a row always has its contents, and
what a dying process left without a row is erased later.
"""

import os
import secrets
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from deployments.contract.errors import (
    JobConflictError,
    JobLimitError,
    JobNotFoundError,
    JobsUnavailableError,
)
from serve_app.config import JobsConfig
from serve_app.jobs.database import open_private
from serve_app.jobs.store import ERASED_AT_ONCE, ORPHAN_AGE_S, Page, Store, page_of

if TYPE_CHECKING:
    from io import BufferedWriter

PIECE_BYTES: Final = 2**18
"""How much of a file is read at a time."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file.

    Attributes:
        id: Names it.
        owner: See `store`.
        filename: The client's name for it.
        purpose: `batch`, or `batch_output` for what a batch wrote.
        num_bytes: The size of its contents.
        created_s: When it came, in Unix seconds.
        expires_s: When it is erased.
    """

    id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_s: float
    expires_s: float

    @classmethod
    def of(cls, row: sqlite3.Row) -> Self:
        """Return the file of a row."""
        return cls(*(row[each.name] for each in fields(cls)))

    def insert(self, connection: sqlite3.Connection) -> None:
        """Add the row, in a transaction of the caller's."""
        connection.execute(
            "INSERT INTO files (id, owner, filename, purpose, num_bytes, created_s, expires_s) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            tuple(getattr(self, each.name) for each in fields(self)),
        )


class FileWriter:
    """Contents that are being written, piece by piece.

    Attributes:
        id: The file's, and no other writer's: an ingress that writes a batch's file after it has
            lost the batch must not touch the file of the one that took over.
        num_bytes: What was written.
    """

    def __init__(self, store: Store) -> None:
        """Name the file; nothing is written yet."""
        self.id = f"file-{secrets.token_hex(16)}"
        self.num_bytes = 0
        self._store = store
        self._place = store.contents / self.id
        self._part = store.contents / f"{self.id}.part"
        self._open: BufferedWriter | None = None
        self._is_in_place = False

    async def write(self, piece: bytes) -> None:
        """Add a piece.

        Raises:
            JobsUnavailableError: The disk is full, or can't be written.
        """

        def write() -> None:
            if self._open is None:
                self._open = open(self._part, "xb", opener=open_private)  # noqa: SIM115 - it stays open
            self._open.write(piece)

        await self._store.on_disk(write)
        self.num_bytes += len(piece)

    async def finish(self) -> None:
        """Put the contents in their place, safe from a loss of power.

        Raises:
            JobsUnavailableError: The disk is full, or can't be written.
        """
        await self.write(b"")

        def finish() -> None:
            assert self._open is not None, "it was opened by the write"
            self._open.flush()
            os.fsync(self._open.fileno())
            self._open.close()
            self._is_in_place = True
            self._part.replace(self._place)

        await self._store.on_disk(finish)

    async def discard(self) -> None:
        """Erase what was written, unless a row has it.

        What can't be erased now is erased with other contents that no row has.
        """

        def erase(connection: sqlite3.Connection) -> None:
            if not _has_row(connection, self.id):
                self._place.unlink(missing_ok=True)

        def discard() -> None:
            with suppress(OSError):  # a full disk may refuse the last piece once more
                if self._open is not None:
                    self._open.close()
            self._part.unlink(missing_ok=True)

        with suppress(JobsUnavailableError):  # the store has logged it
            await self._store.on_disk(discard)
            if self._is_in_place:
                # On the thread of writes: a transaction whose caller was cancelled comes before.
                await self._store.write(erase)


class Files:
    """The files of all owners."""

    def __init__(self, store: Store, config: JobsConfig) -> None:
        self._store = store
        self._config = config

    def writer(self) -> FileWriter:
        """Return what writes the contents of a new file."""
        return FileWriter(self._store)

    async def require_room(self, owner: str, num_bytes: int = 1) -> None:
        """Refuse an owner's next file before it is kept, if there can't be one of this size.

        Raises:
            JobLimitError: The owner has too many files, or too large ones.
            JobsUnavailableError: The store can't be read.
        """
        await self._store.read(lambda connection: self._check_room(connection, owner, num_bytes))

    async def add(
        self, writer: FileWriter, owner: str, filename: str, lifetime_s: float | None = None
    ) -> StoredFile:
        """Finish what a writer has written, and add it as a file for batches.

        Args:
            writer: Has its contents; the caller discards it in any case.
            owner: Whose it is.
            filename: The client's name for it.
            lifetime_s: Seconds until it is erased; None means the configuration's.

        Raises:
            JobLimitError: The owner has too many files, or too large ones.
            JobsUnavailableError: The store can't be written.
        """
        await self.require_room(owner, writer.num_bytes)
        await writer.finish()
        now_s = self._store.unix_s()
        expires_s = now_s + (self._config.expires_after_s if lifetime_s is None else lifetime_s)
        file = StoredFile(writer.id, owner, filename, "batch", writer.num_bytes, now_s, expires_s)

        def add(connection: sqlite3.Connection) -> None:
            self._check_room(connection, owner, file.num_bytes)
            file.insert(connection)

        await self._store.write(add)
        return file

    async def find(self, owner: str, id_: str) -> StoredFile:
        """Return a file.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobsUnavailableError: The store can't be read.
        """
        row = await self._store.read(
            lambda connection: connection.execute(
                "SELECT * FROM files WHERE id = ? AND owner = ?", (id_, owner)
            ).fetchone()
        )
        if row is None:
            raise no_file(id_)
        return StoredFile.of(row)

    async def page(
        self, owner: str, page: Page, purpose: str | None = None
    ) -> tuple[list[StoredFile], bool]:
        """Return an owner's files of a page, and whether more follow.

        Raises:
            JobNotFoundError: `page.after` is none of the owner's.
            JobsUnavailableError: The store can't be read.
        """

        def read(connection: sqlite3.Connection) -> tuple[list[StoredFile], bool] | None:
            found = page_of(connection, "files", owner, page, purpose)
            return None if found is None else ([StoredFile.of(row) for row in found[0]], found[1])

        found = await self._store.read(read)
        if found is None:
            raise no_file(page.after or "", "after")
        return found

    async def delete(self, owner: str, id_: str) -> None:
        """Erase a file.

        Raises:
            JobNotFoundError: The owner has none of this id.
            JobConflictError: A batch still reads it.
            JobsUnavailableError: The store can't be written.
        """

        def delete(connection: sqlite3.Connection) -> None:
            if connection.execute(
                "SELECT 1 FROM batches WHERE input_file_id = ? AND owner = ? AND expires_s IS NULL",
                (id_, owner),
            ).fetchone():
                raise JobConflictError(
                    "A batch still reads the file. Cancel the batch first, or wait for its end."
                )
            if not connection.execute(
                "DELETE FROM files WHERE id = ? AND owner = ?", (id_, owner)
            ).rowcount:
                raise no_file(id_)

        await self._store.write(delete)
        await self._erase(id_)

    async def pieces(self, id_: str) -> AsyncIterator[bytes]:
        """Yield the contents of a file that was found.

        Raises:
            JobsUnavailableError: They can't be read.
        """
        file = await self._store.on_disk(lambda: self.path(id_).open("rb"))
        try:
            while piece := await self._store.on_disk(lambda: file.read(PIECE_BYTES)):
                yield piece
        finally:
            file.close()

    def path(self, id_: str) -> Path:
        """Return where the contents of a file lie; the id must be one of ours."""
        return self._store.contents / id_

    async def expire(self) -> None:
        """Erase files that are too old, and contents that no row has, some at a time.

        Raises:
            JobsUnavailableError: The store can't be written.
        """
        now_s = self._store.unix_s()

        def expire(connection: sqlite3.Connection) -> list[str]:
            rows = connection.execute(
                "DELETE FROM files WHERE number IN (SELECT number FROM files WHERE expires_s < ? "
                "AND id NOT IN (SELECT input_file_id FROM batches WHERE expires_s IS NULL) "
                "LIMIT ?) RETURNING id",
                (now_s, ERASED_AT_ONCE),
            ).fetchall()
            return [row["id"] for row in rows]

        while ids := await self._store.write(expire):
            for id_ in ids:
                await self._erase(id_)
        names = await self._store.on_disk(lambda: self._old_contents(now_s - ORPHAN_AGE_S))
        for at in range(0, len(names), ERASED_AT_ONCE):
            some = names[at : at + ERASED_AT_ONCE]
            for name in await self._store.read(partial(_without_row, names=some)):
                await self._erase(name)

    async def _erase(self, id_: str) -> None:
        await self._store.on_disk(lambda: self.path(id_).unlink(missing_ok=True))

    def _old_contents(self, before_s: float) -> list[str]:
        names: list[str] = []
        with os.scandir(self._store.contents) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # another ingress erases, too
                    if entry.stat().st_mtime < before_s:
                        names.append(entry.name)
        return names

    def _check_room(self, connection: sqlite3.Connection, owner: str, num_bytes: int) -> None:
        """Refuse a file of this size if the owner may not have it beside the others.

        Raises:
            JobLimitError: That is so.
        """
        (num_files,) = connection.execute(
            "SELECT count(*) FROM files WHERE owner = ?", (owner,)
        ).fetchone()
        if num_files >= self._config.max_num_files:
            raise JobLimitError(
                f"There are {num_files} files, and no more are kept (jobs.max_num_files). Delete "
                "some."
            )
        if stored_bytes(connection, owner) + num_bytes > self._config.max_stored_bytes:
            raise JobLimitError(
                "The files and results would have more than "
                f"{self._config.max_stored_bytes} bytes together, the most that are kept "
                "(jobs.max_stored_bytes). Delete some."
            )


def stored_bytes(connection: sqlite3.Connection, owner: str) -> int:
    """Return the size of an owner's files, and of results that are not yet in one."""
    (num_bytes,) = connection.execute(
        "SELECT (SELECT coalesce(sum(num_bytes), 0) FROM files WHERE owner = ?1) + "
        "(SELECT coalesce(sum(num_result_bytes), 0) FROM batches "
        "WHERE owner = ?1 AND expires_s IS NULL)",
        (owner,),
    ).fetchone()
    return int(num_bytes)


def _has_row(connection: sqlite3.Connection, id_: str) -> bool:
    return connection.execute("SELECT 1 FROM files WHERE id = ?", (id_,)).fetchone() is not None


def _without_row(connection: sqlite3.Connection, names: Sequence[str]) -> list[str]:
    return [name for name in names if not _has_row(connection, name)]


def no_file(id_: str, param: str | None = None) -> JobNotFoundError:
    """Return the refusal of an id that no file of the owner has."""
    return JobNotFoundError(f"There is no file {id_[:64]!r}.", param)
