"""What the runner makes of batches whose ingress, file, clock or route fails."""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from serve_app.config import JobsConfig, LimitsConfig
from serve_app.http.standing import Standing
from serve_app.jobs import batch_run, batch_runner, results
from serve_app.jobs.batch import Batch, NewBatch, Result, Status
from serve_app.jobs.batch_run import BatchRun
from serve_app.jobs.batch_runner import BatchRunner
from serve_app.jobs.calls import AskRoute, Call, CallAnswer
from serve_app.jobs.files import stored_bytes
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.leases import LEASE_S
from serve_app.jobs.store import Store
from tests.serve_app.jobs.test_store import Time, add

NEVER_S = 1e6
LINES = "".join(
    f'{{"custom_id": "{name}", "method": "POST", "url": "/v1/completions", "body": {{}}}}\n'
    for name in "abc"
)


class Counts:
    """Notes what the runner counts."""

    def __init__(self) -> None:
        self.num_running = 0
        self.is_idle = asyncio.Event()

    def count_line(self, *, is_error: bool) -> None:
        pass

    def running_batches(self, number: int) -> None:
        self.num_running = number
        if number == 0:
            self.is_idle.set()


async def answer(call: Call) -> CallAnswer:
    return CallAnswer(200, b"{}")


@pytest.fixture
def time() -> Time:
    return Time()


@asynccontextmanager
async def opened(folder: Path, time: Time) -> AsyncIterator[Jobs]:
    made = Jobs(JobsConfig(), Store(folder, time, "this node"))
    try:
        yield made
    finally:
        await made.store.close()


@pytest.fixture
async def jobs(tmp_path: Path, time: Time) -> AsyncIterator[Jobs]:
    async with opened(tmp_path / "jobs", time) as made:
        yield made


async def create(jobs: Jobs, owner: str = "") -> Batch:
    file = await add(jobs.store, LINES.encode(), owner)
    return await jobs.batches.create(
        NewBatch(owner, owner, "/v1/completions", file, "24h", 86400.0, None)
    )


@asynccontextmanager
async def running(
    jobs: Jobs, ask: AskRoute = answer, poll_s: float = 0.01
) -> AsyncIterator[Counts]:
    counts = Counts()
    runner = BatchRunner(jobs, LimitsConfig(), ask, lambda _: Standing(), counts, poll_s=poll_s)
    task = asyncio.create_task(runner.run())
    try:
        yield counts
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(jobs: Jobs, batch: Batch, is_so: Callable[[Batch], bool]) -> Batch:
    async with asyncio.timeout(20):
        while not is_so(  # noqa: ASYNC110 - the store tells of no changes
            found := await jobs.batches.find(batch.owner, batch.id)
        ):
            await asyncio.sleep(0.01)
        return found


async def ended(jobs: Jobs, batch: Batch) -> Batch:
    return await until(jobs, batch, lambda found: found.expires_s is not None)


async def contents(jobs: Jobs, id_: str | None) -> bytes:
    assert id_ is not None
    return b"".join([piece async for piece in jobs.files.pieces(id_)])


async def test_an_ingress_that_was_paused_leaves_the_files_of_the_next_alone(
    jobs: Jobs, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = await create(jobs)
    is_paused, goes_on = asyncio.Event(), asyncio.Event()

    async def cut(batch: Batch, *, errors: bool) -> AsyncIterator[bytes]:
        is_paused.set()
        await goes_on.wait()
        if not errors:
            yield b"the first of the lines\n"

    async with opened(jobs.store.folder, time) as paused:
        monkeypatch.setattr(paused.results, "lines", cut)
        async with running(paused, poll_s=NEVER_S) as counts:
            await is_paused.wait()
            time.now_s += LEASE_S + 1
            async with running(jobs):
                found = await ended(jobs, batch)
            whole = await contents(jobs, found.output_file_id)
            goes_on.set()
            async with asyncio.timeout(20):
                await counts.is_idle.wait()
    assert found.status is Status.COMPLETED
    assert whole.count(b"\n") == 3
    assert await contents(jobs, found.output_file_id) == whole
    known = {found.input_file_id, found.output_file_id}
    assert {path.name for path in jobs.store.contents.iterdir()} == known


async def test_results_are_read_some_bytes_at_a_time(jobs: Jobs) -> None:
    await create(jobs)
    batch = await jobs.batches.claim("a")
    assert batch is not None
    large = [Result(line, line == 3, f"{line}" * 2**20) for line in range(1, 6)]
    await jobs.results.record("a", batch, large)
    for errors, lines in ((False, "1245"), (True, "3")):
        pieces = [piece async for piece in jobs.results.lines(batch, errors=errors)]
        assert pieces == [f"{line * 2**20}\n".encode() for line in lines]


async def test_a_clock_that_is_set_back_completes_no_batch_early(jobs: Jobs, time: Time) -> None:
    batch = await create(jobs)
    is_held, calls = asyncio.Event(), list[str]()

    async def held(call: Call) -> CallAnswer:
        calls.append(call.request_id)
        if len(calls) <= 3:
            try:
                await is_held.wait()
            finally:
                time.now_s = batch.created_s  # between the end of the lines and what is next
        return CallAnswer(200, b"{}")

    async with running(jobs, held):
        await until(jobs, batch, lambda _: len(calls) == 3)
        time.now_s = batch.due_s + 1
        found = await ended(jobs, batch)
    assert (found.status, found.num_completed) == (Status.COMPLETED, 3)
    assert len(calls) == 6


async def test_a_batch_whose_lines_all_have_results_is_completed_even_if_late(
    jobs: Jobs, time: Time
) -> None:
    batch = await create(jobs)
    first = await jobs.batches.claim("a")
    assert first is not None
    await jobs.batches.begin("a", first, 3)
    await jobs.results.record("a", first, [Result(at, False, "{}") for at in (1, 2, 3)])
    time.now_s = batch.due_s + 1
    async with running(jobs):
        found = await ended(jobs, batch)
    assert (found.status, found.num_completed) == (Status.COMPLETED, 3)


async def do_first_line(jobs: Jobs) -> None:
    """Begin with the only batch, give its first line a result, and leave it."""
    first = await jobs.batches.claim("a")
    assert first is not None
    await jobs.batches.begin("a", first, 3)
    await jobs.results.record("a", first, [Result(1, False, "{}")])
    await jobs.batches.leases.release("a")


@pytest.mark.parametrize("num_done", [None, 1])
async def test_a_batch_whose_file_is_gone_fails_and_keeps_what_it_has(
    jobs: Jobs, time: Time, num_done: int | None
) -> None:
    batch = await create(jobs)
    if num_done is not None:
        await do_first_line(jobs)
    jobs.files.path(batch.input_file_id).unlink()
    async with running(jobs):
        found = await ended(jobs, batch)
    assert found.fault is not None
    assert (found.status, found.fault.code) == (Status.FAILED, "file_missing")
    if num_done is not None:
        assert await contents(jobs, found.output_file_id) == b"{}\n"


@pytest.mark.parametrize("num_done", [None, 1])
async def test_a_batch_whose_file_cannot_be_read_waits_for_it_until_it_is_late(
    jobs: Jobs, time: Time, num_done: int | None
) -> None:
    batch = await create(jobs)
    if num_done is not None:
        await do_first_line(jobs)
    path = jobs.files.path(batch.input_file_id)
    path.unlink()
    path.mkdir()  # root may read any file, but nobody a folder
    async with running(jobs) as counts:
        async with asyncio.timeout(20):
            await counts.is_idle.wait()
        assert (await jobs.batches.find("", batch.id)).expires_s is None
        time.now_s = batch.due_s
        found = await ended(jobs, batch)
    assert found.fault is not None
    assert (found.status, found.fault.code) == (Status.FAILED, "file_unreadable")
    assert "Is a directory" in found.fault.message
    if num_done is not None:
        assert await contents(jobs, found.output_file_id) == b"{}\n"


async def test_a_batch_whose_file_was_cut_fails(jobs: Jobs) -> None:
    batch = await create(jobs)
    first = await jobs.batches.claim("a")
    assert first is not None
    await jobs.batches.begin("a", first, 4)
    await jobs.batches.leases.release("a")
    async with running(jobs):
        found = await ended(jobs, batch)
    assert found.fault is not None
    assert (found.status, found.fault.code) == (Status.FAILED, "file_missing")
    assert (await contents(jobs, found.output_file_id)).count(b"\n") == 3


async def test_a_bug_at_one_line_is_an_error_of_that_line(
    jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    batch = await create(jobs)

    async def fails_at_b(call: Call) -> CallAnswer:
        if call.request_id.endswith("_2"):
            raise KeyError("b")
        return CallAnswer(200, b"{}")

    async with running(jobs, fails_at_b):
        found = await ended(jobs, batch)
    assert (found.num_completed, found.num_failed) == (2, 1)
    assert b'"status_code": 500' in await contents(jobs, found.error_file_id)
    assert f"a line of a batch has failed: {batch.id}_2" in caplog.text


async def test_a_bug_of_the_runner_is_logged_and_does_not_end_it(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = await create(jobs)
    claim, num_calls = jobs.batches.claim, 0

    async def fails_once(*args: object, **kwargs: object) -> Batch | None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise KeyError("a bug")
        return await claim(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(jobs.batches, "claim", fails_once)
    async with running(jobs):
        found = await ended(jobs, batch)
    assert found.status is Status.COMPLETED
    assert "the runner of batches has failed, and goes on" in caplog.text


async def test_a_batch_that_no_ingress_runs_is_cancelled_at_once(jobs: Jobs) -> None:
    batch = await create(jobs)
    cancelled = await jobs.batches.cancel("", batch.id)
    assert cancelled.status is Status.CANCELLED
    assert list(cancelled.moments) == ["cancelling", "cancelled"]
    assert cancelled.expires_s is not None
    assert await jobs.batches.claim("a") is None
    await jobs.files.delete("", batch.input_file_id)


async def test_batches_end_while_others_have_all_places(
    jobs: Jobs, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "MAX_RUNNING", 1)
    is_held = asyncio.Event()

    async def held(call: Call) -> CallAnswer:
        await is_held.wait()
        return await answer(call)

    kept = await create(jobs)
    async with running(jobs, held):
        await until(jobs, kept, lambda found: found.status is Status.IN_PROGRESS)
        # One that another ingress has left with a result.
        left = await create(jobs)
        await jobs.store.write(
            lambda connection: connection.execute(
                "UPDATE batches SET status = 'in_progress', num_lines = 3, num_completed = 1 "
                "WHERE number = ?",
                (left.number,),
            )
        )
        assert (await jobs.batches.cancel("", left.id)).status is Status.CANCELLING
        assert (await ended(jobs, left)).status is Status.CANCELLED
        late = await create(jobs)
        await jobs.store.write(
            lambda connection: connection.execute(
                "UPDATE batches SET due_s = ? WHERE number = ?", (time.now_s, late.number)
            )
        )
        found = await ended(jobs, late)
        assert (found.status, found.num_failed) == (Status.EXPIRED, 3)
        waiting = await create(jobs)
        is_held.set()
        for each in (kept, waiting):
            assert (await ended(jobs, each)).status is Status.COMPLETED


async def test_results_that_have_no_room_fail_their_batch_which_keeps_the_others(
    tmp_path: Path, time: Time
) -> None:
    most = len(LINES) + 2000

    async def long_answer(call: Call) -> CallAnswer:
        return CallAnswer(200, b'"' + b"x" * 800 + b'"')

    store = Store(tmp_path / "jobs", time, "this node")
    jobs = Jobs(JobsConfig(max_stored_bytes=most, max_running_lines=1), store)
    try:
        batch = await create(jobs)
        async with running(jobs, long_answer):
            found = await ended(jobs, batch)
        assert found.fault is not None
        assert (found.status, found.fault.code) == (Status.FAILED, "job_limit_reached")
        assert "jobs.max_stored_bytes" in found.fault.message
        assert (await contents(jobs, found.output_file_id)).count(b"\n") == found.num_completed
        stored = await store.read(lambda connection: stored_bytes(connection, ""))
        contents_bytes = sum(path.stat().st_size for path in store.contents.iterdir())
        assert 0 < found.num_completed < 3
        assert stored == contents_bytes <= most
    finally:
        await store.close()


async def test_a_line_with_which_replicas_are_lost_is_given_up_and_others_are_asked_on(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "FIRST_WAIT_S", 0.0)
    batch = await create(jobs)
    calls = Counter[str]()

    async def lost(call: Call) -> CallAnswer:
        line = call.request_id[-1]
        calls[line] += 1
        if line == "1" or (line == "2" and calls[line] <= 2 * batch_run.MAX_LOSSES):
            return CallAnswer(503, b'{"error": {"message": "lost"}}', lost_replicas=line == "1")
        return await answer(call)

    async with running(jobs, lost):
        found = await ended(jobs, batch)
    assert (found.status, found.num_completed, found.num_failed) == (Status.COMPLETED, 2, 1)
    assert calls["1"] == batch_run.MAX_LOSSES
    (error,) = (await contents(jobs, found.error_file_id)).splitlines()
    response = json.loads(error)["response"]
    assert (response["status_code"], response["body"]["error"]["message"]) == (503, "lost")


async def test_the_losses_of_a_line_are_counted_over_all_ingresses(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "FIRST_WAIT_S", 0.0)
    batch = await create(jobs)
    num_calls = 0
    has_lost = asyncio.Event()

    async def lost(call: Call) -> CallAnswer:
        nonlocal num_calls
        if not call.request_id.endswith("_1"):
            return await answer(call)
        num_calls += 1
        if num_calls == batch_run.MAX_LOSSES - 1:
            has_lost.set()
        return CallAnswer(503, b'{"error": {}}', lost_replicas=True)

    async with running(jobs, lost), asyncio.timeout(20):
        await has_lost.wait()
        await until(jobs, batch, lambda found: found.num_completed == 2)
    async with running(jobs, lost):
        found = await ended(jobs, batch)
    assert (found.num_completed, found.num_failed) == (2, 1)
    # The ingress may have been stopped between an answer and its note.
    assert num_calls <= batch_run.MAX_LOSSES + 1


@asynccontextmanager
async def held_batches(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, places: int, owners: str
) -> AsyncIterator[tuple[list[Batch], Callable[[], list[str]], asyncio.Event]]:
    """Run batches whose lines wait for an event; yield them, whose run, and the event."""
    monkeypatch.setattr(batch_runner, "MAX_RUNNING", places)
    is_held = asyncio.Event()
    asked = Counter[str]()

    async def held(call: Call) -> CallAnswer:
        owner = call.key_name or ""
        asked[owner] += 1
        try:
            await is_held.wait()
        finally:
            asked[owner] -= 1
        return await answer(call)

    batches = [await create(jobs, owner) for owner in owners]
    async with running(jobs, held):
        yield batches, lambda: sorted(owner for owner, number in asked.items() if number), is_held


async def test_places_are_shared_evenly_among_owners(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held_batches(jobs, monkeypatch, 4, "aaaaaa") as (batches, whose, goes_on):
        await eventually(lambda: whose() == ["a"])
        batches += [await create(jobs, owner) for owner in "bbb"]
        await eventually_of(jobs, lambda running: running == ["a", "a", "b", "b"])
        goes_on.set()
        for each in batches:
            found = await ended(jobs, each)
            assert (found.status, found.num_completed) == (Status.COMPLETED, 3)


async def test_leases_are_renewed_while_a_batch_that_makes_room_is_slow_to_stop(
    jobs: Jobs, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "MAX_RUNNING", 2)
    is_stopping, goes_on = asyncio.Event(), asyncio.Event()

    async def slow_to_stop(call: Call) -> CallAnswer:
        try:
            await goes_on.wait()
        except asyncio.CancelledError:
            is_stopping.set()
            await goes_on.wait()
            raise
        return await answer(call)

    batches = [await create(jobs, "a") for _ in range(2)]
    async with running(jobs, slow_to_stop):
        await eventually_of(jobs, lambda running: running == ["a", "a"])
        batches.append(await create(jobs, "b"))
        try:
            async with asyncio.timeout(20):
                await is_stopping.wait()
            time.now_s += LEASE_S / 2
            await eventually_leased(jobs, time.now_s + LEASE_S)
        finally:
            goes_on.set()
        for each in batches:
            found = await ended(jobs, each)
            assert (found.status, found.num_completed) == (Status.COMPLETED, 3)


async def test_with_more_owners_than_places_each_has_its_turn_and_its_lines_are_finished(
    tmp_path: Path, time: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = list[tuple[str, asyncio.Event]]()
    calls = list[str]()

    class Watched(BatchRun):
        async def run(self, batch: Batch, stopped: asyncio.Event, yielding: asyncio.Event) -> None:
            turns.append((batch.owner, yielding))
            await super().run(batch, stopped, yielding)

    async def longer_than_the_first_turn(call: Call) -> CallAnswer:
        calls.append(call.request_id)
        owned = [yielding for owner, yielding in turns if owner == call.key_name]
        if len(owned) == 1:
            await owned[0].wait()
        return await answer(call)

    monkeypatch.setattr(batch_runner, "BatchRun", Watched)
    monkeypatch.setattr(batch_runner, "MAX_RUNNING", 2)
    monkeypatch.setattr(batch_runner, "TURN_S", 0.2)
    jobs = Jobs(JobsConfig(max_running_lines=1), Store(tmp_path / "jobs", time, "this node"))
    try:
        batches = [await create(jobs, owner) for owner in "abcd"]
        async with running(jobs, longer_than_the_first_turn):
            for each in batches:
                found = await ended(jobs, each)
                assert (found.status, found.num_completed) == (Status.COMPLETED, 3)
    finally:
        await jobs.store.close()
    assert {owner for owner, _ in turns[:4]} == set("abcd")
    assert len(set(calls)) == len(calls) == 12


async def test_an_owner_keeps_its_only_place_for_a_while(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held_batches(jobs, monkeypatch, 1, "ab") as (batches, whose, goes_on):
        await eventually(lambda: whose() == ["a"])
        cancelled = await create(jobs, "c")
        await jobs.batches.cancel("c", cancelled.id)
        await ended(jobs, cancelled)  # turns have passed meanwhile
        assert whose() == ["a"]
        goes_on.set()
        for each in batches:
            await ended(jobs, each)


async def test_rows_of_results_are_erased_after_the_end_some_at_a_time(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS_BYTES", 1)
    sizes: list[int] = []
    write = jobs.store.write

    async def noting(work: Callable[[sqlite3.Connection], object]) -> object:
        before = await jobs.store.read(num_rows)
        result = await write(work)
        sizes.append(before - await jobs.store.read(num_rows))
        return result

    monkeypatch.setattr(jobs.store, "write", noting)
    batch = await create(jobs)
    async with running(jobs):
        found = await ended(jobs, batch)
        async with asyncio.timeout(20):
            while await jobs.store.read(num_rows):  # noqa: ASYNC110 - the store tells of no changes
                await asyncio.sleep(0.01)
    assert (await contents(jobs, found.output_file_id)).count(b"\n") == 3
    assert max(sizes) == 1


def num_rows(connection: sqlite3.Connection) -> int:
    (number,) = connection.execute("SELECT count(*) FROM results").fetchone()
    return int(number)


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not is_so():  # noqa: ASYNC110 - the runner tells of no changes
            await asyncio.sleep(0.01)


async def eventually_of(jobs: Jobs, is_so: Callable[[list[str]], bool]) -> None:
    """Wait until it is so of the owners of batches that run."""

    def running(connection: sqlite3.Connection) -> list[str]:
        rows = connection.execute("SELECT owner FROM batches WHERE lease_owner IS NOT NULL")
        return sorted(row["owner"] for row in rows)

    async with asyncio.timeout(20):
        while not is_so(  # noqa: ASYNC110 - the store tells of no changes
            await jobs.store.read(running)
        ):
            await asyncio.sleep(0.01)


async def eventually_leased(jobs: Jobs, until_s: float) -> None:
    """Wait until the leases of two batches reach as far."""

    def num_leased(connection: sqlite3.Connection) -> int:
        (number,) = connection.execute(
            "SELECT count(*) FROM batches WHERE lease_owner IS NOT NULL AND lease_until_s >= ?",
            (until_s,),
        ).fetchone()
        return int(number)

    async with asyncio.timeout(20):
        while await jobs.store.read(num_leased) < 2:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
