"""The store's folder and database: what can be wrong with them, and that they are used again."""

import asyncio
import fcntl
import os
import resource
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.contract.errors import JobsUnavailableError
from serve_app.config import JobsConfig
from serve_app.jobs import database
from serve_app.jobs.files import Files, StoredFile
from serve_app.jobs.store import NODE_LEASE_S, NODE_RENEWAL_S, Store

LARGE = b"x" * 2**20


class Time:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
async def store(folder: Path) -> AsyncIterator[Store]:
    made = Store(folder, Time(), "this node")
    yield made
    await made.close()


def count(connection: sqlite3.Connection) -> int:
    (found,) = connection.execute("SELECT count(*) FROM files").fetchone()
    assert isinstance(found, int)
    return found


def files_of(store: Store) -> Files:
    return Files(store, JobsConfig(folder=str(store.folder)))


async def add(store: Store, contents: bytes = b"{}\n", owner: str = "") -> str:
    files = files_of(store)
    await files.require_room(owner)
    writer = files.writer()
    try:
        await writer.write(contents)
        return (await files.add(writer, owner, "name")).id
    finally:
        await writer.discard()


@contextmanager
def no_file_grows_beyond(num_bytes: int) -> Iterator[None]:
    """Let the system refuse writes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_the_folder_is_made_and_only_its_user_may_enter(store: Store) -> None:
    await store.read(count)
    assert store.folder.stat().st_mode & 0o777 == 0o700
    assert store.contents.stat().st_mode & 0o777 == 0o700


async def test_a_folder_that_others_may_enter_is_closed_to_them(store: Store) -> None:
    store.folder.mkdir()
    store.folder.chmod(0o755)
    await store.read(count)
    assert store.folder.stat().st_mode & 0o777 == 0o700


async def test_a_missing_parent_is_not_made(tmp_path: Path) -> None:
    store = Store(tmp_path / "volume" / "jobs", Time())
    with pytest.raises(JobsUnavailableError, match="No such file or directory"):
        await store.read(count)
    (tmp_path / "volume").mkdir()
    assert await store.read(count) == 0
    await store.close()


async def test_an_error_names_no_path(tmp_path: Path) -> None:
    store = Store(tmp_path / "volume" / "jobs", Time())
    with pytest.raises(JobsUnavailableError) as caught:
        await store.read(count)
    assert str(tmp_path) not in str(caught.value)
    await store.close()


async def test_another_programs_database_is_left_as_it_is(store: Store) -> None:
    store.folder.mkdir(mode=0o700)
    path = store.folder / "jobs.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(JobsUnavailableError, match="another program's database"):
            await store.write(count)
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT name FROM sqlite_schema").fetchall()
    connection.close()
    assert found == [("theirs",)]
    assert path.read_bytes() == before


async def test_only_its_user_may_read_what_is_stored(store: Store) -> None:
    await add(store)
    assert {path.stat().st_mode & 0o777 for path in store.contents.iterdir()} == {0o600}
    databases = list(store.folder.glob("jobs.sqlite*"))
    assert len(databases) == 3
    assert {path.stat().st_mode & 0o777 for path in databases} == {0o600}


@pytest.mark.parametrize("sign", ["", "{", "[]", "1", "{}", '{"node": "a", "until_s": "x"}'])
async def test_a_broken_sign_of_a_node_keeps_nobody_out(store: Store, sign: str) -> None:
    store.folder.mkdir(mode=0o700)
    (store.folder / "node").write_text(sign)
    assert await store.read(count) == 0


async def test_of_two_files_for_one_place_the_refused_one_is_erased(store: Store) -> None:
    await store.read(count)
    files = Files(store, JobsConfig(folder=str(store.folder), max_num_files=1))
    writers = [files.writer(), files.writer()]
    for writer in writers:
        await writer.write(b"a prompt")
    added = await asyncio.gather(
        *(files.add(each, "", "name") for each in writers), return_exceptions=True
    )
    for writer in writers:
        await writer.discard()
    (kept,) = [each for each in added if isinstance(each, StoredFile)]
    assert [path.name for path in store.contents.iterdir()] == [kept.id]


async def test_a_file_whose_row_can_not_be_written_is_erased(store: Store) -> None:
    await store.read(count)
    writer = files_of(store).writer()
    await writer.write(b"a prompt")
    await writer.finish()
    await writer.discard()
    assert list(store.contents.iterdir()) == []


async def test_a_file_that_is_no_database_is_refused(store: Store) -> None:
    store.folder.mkdir(mode=0o700)
    (store.folder / "jobs.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(JobsUnavailableError, match="not a database"):
        await store.read(count)
    assert (store.folder / "jobs.sqlite").read_bytes() == b"not a database" * 100


async def test_a_store_of_the_version_before_gets_the_tables_that_it_lacks(
    store: Store, folder: Path
) -> None:
    await add(store)
    with sqlite3.connect(folder / "jobs.sqlite") as connection:
        connection.execute("DROP TABLE responses")
        connection.execute("DROP TABLE response_events")
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    other = Store(folder, Time(), "this node")
    assert await other.read(count) == 1
    tables = await other.read(
        lambda each: each.execute("SELECT count(*) FROM responses, response_events").fetchone()
    )
    assert tuple(tables) == (0,)
    assert tuple(await other.read(lambda each: each.execute("PRAGMA user_version").fetchone())) == (
        3,
    )
    await other.close()


async def test_another_version_is_refused_and_named(store: Store, folder: Path) -> None:
    await store.read(count)
    other = Store(folder, Time(), "this node")
    with sqlite3.connect(folder / "jobs.sqlite") as connection:
        connection.execute("PRAGMA user_version = 7")
    connection.close()
    with pytest.raises(
        JobsUnavailableError, match="has version 7, and this server reads version 3"
    ):
        await other.read(count)
    await other.close()


async def test_a_database_that_was_cut_is_refused(folder: Path) -> None:
    store = Store(folder, Time(), "this node")
    for _ in range(50):
        await add(store)
    await store.close()
    path = folder / "jobs.sqlite"
    os.truncate(path, path.stat().st_size // 2)
    cut = Store(folder, Time(), "this node")
    with pytest.raises(JobsUnavailableError, match="malformed"):
        await cut.read(lambda connection: connection.execute("SELECT * FROM files").fetchall())
    await cut.close()


async def test_contents_that_do_not_fit_leave_nothing_behind(store: Store) -> None:
    kept = await add(store)
    with no_file_grows_beyond(2**19), pytest.raises(JobsUnavailableError, match="File too large"):
        await add(store, LARGE)
    assert [path.name for path in store.contents.iterdir()] == [kept]
    assert await store.read(count) == 1
    await add(store, LARGE)
    assert await store.read(count) == 2


async def test_a_database_that_can_not_grow_refuses_and_is_used_again(store: Store) -> None:
    await add(store)
    size = (store.folder / "jobs.sqlite-wal").stat().st_size
    with no_file_grows_beyond(size), pytest.raises(JobsUnavailableError):
        await store.write(
            lambda connection: connection.execute(
                "INSERT INTO results VALUES (1, 1, 0, ?)", ("x" * 2**20,)
            )
        )
    await add(store)
    assert await store.read(count) == 2


async def test_a_folder_that_can_not_be_written_is_refused() -> None:
    store = Store(Path("/sys/jobs"), Time())  # where not even root makes one
    with pytest.raises(JobsUnavailableError, match=r"not permitted|denied|Read-only"):
        await store.read(count)
    await store.close()


async def test_a_reason_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path / "volume" / "jobs", Time())
    for _ in range(3):
        with pytest.raises(JobsUnavailableError):
            await store.read(count)
    (record,) = caplog.records
    assert str(store.folder) in record.getMessage()
    await store.close()


async def test_ingresses_of_a_node_share_the_store(store: Store, folder: Path) -> None:
    beside = Store(folder, Time(), "this node")
    await asyncio.gather(*(add(each) for _ in range(20) for each in (store, beside)))
    assert await store.read(count) == await beside.read(count) == 40
    await beside.close()


async def test_a_new_folder_that_several_open_at_once_gets_its_tables_once(tmp_path: Path) -> None:
    for number in range(20):
        stores = [Store(tmp_path / str(number), Time(), "this node") for _ in range(3)]
        await asyncio.gather(*(add(store) for store in stores), *(s.read(count) for s in stores))
        assert await stores[0].read(count) == 3
        for store in stores:
            await store.close()


async def test_a_database_that_another_process_opens_is_waited_for_but_not_for_ever(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.folder.mkdir()
    waits = threading.Event()
    monkeypatch.setattr("serve_app.jobs.database.time.sleep", lambda _: waits.set())
    monkeypatch.setattr(database, "BUSY_S", 600.0)  # longer than any pause of this process
    with opened_elsewhere(store.folder):
        reading = asyncio.create_task(store.read(count))
        await asyncio.to_thread(waits.wait)
        assert not (store.folder / "jobs.sqlite").exists()
    assert await reading == 0
    monkeypatch.setattr(database, "BUSY_S", 0.0)
    beside = Store(store.folder, Time(), "this node")
    with (
        opened_elsewhere(store.folder),
        pytest.raises(JobsUnavailableError, match="another process is opening it"),
    ):
        await beside.read(count)
    await beside.close()


@contextmanager
def opened_elsewhere(folder: Path) -> Iterator[None]:
    """Hold the lock of those who open the database."""
    with open(folder / "jobs.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


async def test_another_node_is_kept_out_until_the_first_has_been_silent(folder: Path) -> None:
    time = Time()
    first, second = Store(folder, time, "one"), Store(folder, time, "another")
    await first.read(count)
    with pytest.raises(JobsUnavailableError, match="another node uses the folder"):
        await second.read(count)
    time.now_s += NODE_LEASE_S + 1
    await second.read(count)
    with pytest.raises(JobsUnavailableError, match="another node uses the folder"):
        await first.read(count)
    await first.close()
    await second.close()


async def test_a_sign_that_a_full_disk_refuses_leaves_no_file(folder: Path) -> None:
    time = Time()
    store = Store(folder, time, "this node")
    await store.read(count)
    files = {path.name for path in store.folder.iterdir()}
    with no_file_grows_beyond(0):
        for _ in range(3):
            time.now_s += NODE_RENEWAL_S
            with pytest.raises(JobsUnavailableError, match="File too large"):
                await store.read(count)
    assert {path.name for path in store.folder.iterdir()} <= files
    assert await store.read(count) == 0
    await store.close()


async def test_reads_go_on_while_the_log_waits_to_be_emptied(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "BUSY_S", 60.0)
    await add(store)
    slow = sqlite3.connect(folder / "jobs.sqlite", isolation_level=None)
    other = sqlite3.connect(folder / "jobs.sqlite", isolation_level=None, timeout=0)
    try:
        slow.execute("BEGIN")
        assert count(slow) == 1  # it reads the log as it is now until its transaction ends
        await add(store)
        emptying = asyncio.create_task(store.empty_log())
        async with asyncio.timeout(20):
            while not is_locked(other):  # noqa: ASYNC110 - SQLite tells of no locks
                await asyncio.sleep(0.01)
            assert await store.read(count) == 2
        assert not emptying.done()
        slow.rollback()
        async with asyncio.timeout(20):
            await emptying
        assert (folder / "jobs.sqlite-wal").stat().st_size == 0
    finally:
        slow.close()
        other.close()


def is_locked(connection: sqlite3.Connection) -> bool:
    """Return whether another connection keeps all others from writing."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError:
        return True
    connection.rollback()
    return False


async def test_an_error_of_the_caller_undoes_what_it_wrote(store: Store) -> None:
    def fail(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO results VALUES (1, 1, 0, 'x')")
        raise KeyError("no")

    with pytest.raises(KeyError):
        await store.write(fail)
    rows = await store.read(
        lambda connection: connection.execute("SELECT * FROM results").fetchall()
    )
    assert rows == []


async def test_what_is_too_old_is_erased_with_contents_that_have_no_row(folder: Path) -> None:
    time = Time()
    store = Store(folder, time, "this node")
    await add(store)
    orphan = store.contents / "file-of-a-dead-process.part"
    orphan.write_bytes(b"a prompt")
    os.utime(orphan, (0, 0))
    files = files_of(store)
    await files.expire()
    assert not orphan.exists()
    assert len(list(store.contents.iterdir())) == await store.read(count) == 1
    time.now_s += JobsConfig().expires_after_s + 1
    await files.expire()
    assert len(list(store.contents.iterdir())) == await store.read(count) == 0
    await store.close()
