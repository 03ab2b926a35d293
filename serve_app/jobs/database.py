"""The database of jobs: its tables, and how a connection to it is opened.

A new file gets the tables, one of an older version what it lacks. Another program's database, and
one of a newer version, are left as they are.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

APPLICATION_ID: Final = 0x52617953
"""Marks the database as ours, in SQLite's header."""

VERSION: Final = 3
"""The version of `SCHEMA`, kept in SQLite's `user_version`. Version 2 had no responses."""

RESPONSES: Final = """
CREATE TABLE responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    tenant TEXT NOT NULL,
    previous INTEGER,
    status TEXT NOT NULL,
    items TEXT NOT NULL,
    body TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    request TEXT,
    seed INTEGER NOT NULL DEFAULT 0,
    created_s REAL NOT NULL,
    expires_s REAL NOT NULL,
    lease_owner TEXT,
    lease_until_s REAL NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX responses_by_size ON responses (owner, num_bytes);
CREATE INDEX responses_by_expiry ON responses (expires_s);
CREATE INDEX responses_under_way ON responses (number) WHERE status IN ('queued', 'in_progress');

CREATE TABLE response_events (
    response INTEGER NOT NULL,
    number INTEGER NOT NULL,
    num_events INTEGER NOT NULL,
    events TEXT NOT NULL,
    replay TEXT NOT NULL,
    PRIMARY KEY (response, number)
) STRICT;
"""
"""What version 3 has added."""

SCHEMA: Final = f"""
CREATE TABLE files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    created_s REAL NOT NULL,
    expires_s REAL NOT NULL
) STRICT;
CREATE INDEX files_of_owner ON files (owner, number);
CREATE INDEX files_by_size ON files (owner, num_bytes);
CREATE INDEX files_by_expiry ON files (expires_s);

CREATE TABLE batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    tenant TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata TEXT,
    status TEXT NOT NULL,
    moments TEXT NOT NULL,
    created_s REAL NOT NULL,
    due_s REAL NOT NULL,
    expires_s REAL,
    num_lines INTEGER NOT NULL DEFAULT 0,
    num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    num_result_bytes INTEGER NOT NULL DEFAULT 0,
    fault TEXT,
    output_file_id TEXT,
    error_file_id TEXT,
    lease_owner TEXT,
    lease_until_s REAL NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX batches_of_owner ON batches (owner, number);
CREATE INDEX batches_under_way ON batches (number) WHERE expires_s IS NULL;
CREATE INDEX batches_by_result_bytes ON batches (owner, num_result_bytes)
    WHERE expires_s IS NULL;
CREATE INDEX batches_by_input ON batches (input_file_id) WHERE expires_s IS NULL;
CREATE INDEX batches_by_expiry ON batches (expires_s);

CREATE TABLE results (
    batch INTEGER NOT NULL,
    line INTEGER NOT NULL,
    is_error INTEGER NOT NULL,
    text TEXT NOT NULL,
    PRIMARY KEY (batch, line)
) STRICT;

CREATE TABLE losses (
    batch INTEGER NOT NULL,
    line INTEGER NOT NULL,
    number INTEGER NOT NULL,
    PRIMARY KEY (batch, line)
) STRICT;
{RESPONSES}
"""

BUSY_S: Final = 5.0
"""How long a call waits for another process's transaction; each takes milliseconds."""

RETRY_S: Final = 0.01

FOREIGN: Final = "jobs.sqlite in its folder is another program's database"


class UnusableDatabaseError(sqlite3.DatabaseError):
    """The database is not one that this server reads; the message says why."""


def opened(path: Path) -> sqlite3.Connection:
    """Return a new connection to the database of a file, which is made if it is missing.

    Raises:
        UnusableDatabaseError: It is another program's, or of a version that is not read here.
        OSError, sqlite3.Error: It can't be made or read.
    """
    with _alone(path.with_suffix(".lock")):
        # SQLite's own files beside it get its rights.
        with suppress(FileExistsError), open(path, "xb", opener=open_private):
            pass
        connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection)
        except BaseException:
            connection.close()
            raise
    return connection


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Let no other thread or process of this machine open the database during the block.

    Two that open a new database at once may find tables without the mark that they are ours. The
    lock is a file of its own: a process that closes the database's file drops SQLite's locks.

    Raises:
        OSError: The lock can't be written.
        sqlite3.OperationalError: Another one has been opening it for `BUSY_S`.
    """
    until_s = time.monotonic() + BUSY_S
    with open(lock, "ab", opener=open_private) as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until_s:
                    raise sqlite3.OperationalError("another process is opening it") from None
                time.sleep(RETRY_S)
        yield


def open_private(path: str, flags: int) -> int:
    """Open a file for `open`; a new one only its user may read, also where it is copied."""
    return os.open(path, flags, 0o600)


def _prepare(connection: sqlite3.Connection) -> None:
    connection.row_factory = sqlite3.Row
    application, version = _marks(connection)
    if (application, version) == (0, 0):
        _create(connection)
        application, version = _marks(connection)
    if (application, version) == (APPLICATION_ID, 2):
        _build(connection, RESPONSES, lambda: _marks(connection)[1] == 2)
        application, version = _marks(connection)
    if application != APPLICATION_ID:
        raise UnusableDatabaseError(FOREIGN)
    if version != VERSION:
        raise UnusableDatabaseError(
            f"its database has version {version}, and this server reads version {VERSION}. "
            "Serve with the raystream that wrote it, or name an empty folder"
        )
    connection.execute("PRAGMA journal_mode = WAL")
    # A job that was acknowledged outlives a loss of power, too.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")


def _create(connection: sqlite3.Connection) -> None:
    with _rolled_back(connection):
        is_theirs = _marks(connection) == (0, 0) and _has_tables(connection)
    if is_theirs:
        raise UnusableDatabaseError(FOREIGN)
    connection.execute("PRAGMA journal_mode = WAL")  # writes the header
    _build(
        connection,
        SCHEMA,
        lambda: _marks(connection) == (0, 0) and not _has_tables(connection),
    )


def _build(connection: sqlite3.Connection, schema: str, is_needed: Callable[[], bool]) -> None:
    """Make the tables of a schema, unless another ingress has made them meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        if is_needed():
            for statement in filter(str.strip, schema.split(";")):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
    except BaseException:
        connection.rollback()
        raise
    connection.commit()


def _marks(connection: sqlite3.Connection) -> tuple[int, int]:
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return application, version


def _has_tables(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_schema").fetchone() is not None


@contextmanager
def _rolled_back(connection: sqlite3.Connection) -> Iterator[None]:
    """Let all reads of a block see the same state."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.rollback()
