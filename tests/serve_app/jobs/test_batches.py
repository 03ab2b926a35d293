"""Who runs a batch, and what only that ingress may write."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deployments.contract.errors import JobConflictError, JobLimitError, JobNotFoundError
from serve_app.config import JobsConfig
from serve_app.jobs.batch import Batch, NewBatch, Result, Status
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.leases import LEASE_S, LeaseLostError
from serve_app.jobs.store import Page, Store
from tests.serve_app.jobs.test_store import Time, add


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def jobs(tmp_path: Path, time: Time) -> AsyncIterator[Jobs]:
    made = Jobs(JobsConfig(max_num_batches=5), Store(tmp_path / "jobs", time, "this node"))
    yield made
    await made.store.close()


async def create(jobs: Jobs, file: str | None = None, owner: str = "") -> Batch:
    file = file or await add(jobs.store)
    asked = NewBatch(owner, owner, "/v1/completions", file, "24h", 86400.0, None)
    return await jobs.batches.create(asked)


async def test_one_ingress_claims_a_batch(jobs: Jobs) -> None:
    created = await create(jobs)
    claimed = await jobs.batches.claim("a")
    assert claimed is not None
    assert claimed.id == created.id
    assert await jobs.batches.claim("b") is None


async def test_a_silent_ingress_loses_its_batch_and_can_write_nothing_more(
    jobs: Jobs, time: Time
) -> None:
    await create(jobs)
    first = await jobs.batches.claim("a")
    assert first is not None
    await jobs.batches.begin("a", first, 2)
    time.now_s += LEASE_S + 1
    second = await jobs.batches.claim("b")
    assert second is not None
    assert second.status is Status.IN_PROGRESS
    assert await jobs.batches.leases.renew("a", [first.number]) == []
    with pytest.raises(LeaseLostError):
        await jobs.results.record("a", first, [Result(1, False, "late")])
    with pytest.raises(LeaseLostError):
        await jobs.batches.end("a", first, Status.CANCELLED)
    await jobs.results.record("b", second, [Result(1, False, "once")])
    assert [some async for some in jobs.results.lines(second, errors=False)] == [b"once\n"]


@pytest.mark.parametrize("is_given_back", [False, True])
async def test_a_batch_that_no_ingress_runs_does_not_wait_for_a_clock_that_was_set_back(
    jobs: Jobs, time: Time, is_given_back: bool
) -> None:
    await create(jobs)
    claimed = await jobs.batches.claim("a")
    assert claimed is not None
    if is_given_back:
        await jobs.batches.leases.give_back("a", claimed.number)
    time.now_s -= 3600
    assert await jobs.batches.claim("b") is not None


async def test_a_clock_that_is_set_back_takes_no_batch_from_an_ingress_that_renews(
    jobs: Jobs, time: Time
) -> None:
    await create(jobs)
    claimed = await jobs.batches.claim("a")
    assert claimed is not None
    time.now_s -= 3600
    assert await jobs.batches.leases.renew("a", [claimed.number])
    assert await jobs.batches.claim("b") is None


async def test_a_renewed_lease_is_kept(jobs: Jobs, time: Time) -> None:
    await create(jobs)
    batch = await jobs.batches.claim("a")
    assert batch is not None
    for _ in range(3):
        time.now_s += LEASE_S - 1
        assert len(await jobs.batches.leases.renew("a", [batch.number])) == 1
        assert await jobs.batches.claim("b") is None


async def test_a_line_has_one_result_and_is_counted_once(jobs: Jobs) -> None:
    await create(jobs)
    batch = await jobs.batches.claim("a")
    assert batch is not None
    first = [Result(1, False, "one"), Result(2, True, "two")]
    assert await jobs.results.record("a", batch, first) == first
    again = [Result(2, False, "other"), Result(3, False, "three")]
    assert await jobs.results.record("a", batch, again) == again[1:]
    found = await jobs.batches.find("", batch.id)
    assert (found.num_completed, found.num_failed) == (2, 1)
    assert await jobs.results.done(batch) == {1, 2, 3}


async def test_the_owner_with_the_fewest_batches_here_is_next(jobs: Jobs) -> None:
    for owner in ("many", "many", "few"):
        file = await add(jobs.store, owner=owner)
        await create(jobs, file, owner)
    beside: dict[str, str] = {}
    while (claimed := await jobs.batches.claim("a", beside)) is not None:
        beside[claimed.id] = claimed.owner
    assert list(beside.values()) == ["many", "few", "many"]


async def test_an_ingress_does_not_claim_what_it_runs_itself(jobs: Jobs, time: Time) -> None:
    await create(jobs)
    batch = await jobs.batches.claim("a")
    assert batch is not None
    time.now_s += LEASE_S + 1  # a pause between the renewal and the next claim
    assert await jobs.batches.claim("a", {batch.id: batch.owner}) is None
    assert await jobs.batches.claim("a") is not None


async def test_an_end_needs_the_state_before_it(jobs: Jobs) -> None:
    await create(jobs)
    batch = await jobs.batches.claim("a")
    assert batch is not None
    with pytest.raises(LeaseLostError):
        await jobs.batches.end("a", batch, Status.COMPLETED)
    await jobs.batches.cancel("", batch.id)
    await jobs.batches.end("a", batch, Status.CANCELLED)
    with pytest.raises(JobConflictError, match="cancelled"):
        await jobs.batches.cancel("", batch.id)
    found = await jobs.batches.find("", batch.id)
    assert list(found.moments) == ["cancelling", "cancelled"]


async def test_a_batch_that_is_cancelled_at_once_leaves_no_losses(jobs: Jobs) -> None:
    await create(jobs)
    batch = await jobs.batches.claim("a")
    assert batch is not None
    await jobs.results.note_loss("a", batch, 1)
    await jobs.batches.leases.release("a")
    assert (await jobs.batches.cancel("", batch.id)).status is Status.CANCELLED
    assert await jobs.store.read(lambda rows: rows.execute("SELECT * FROM losses").fetchall()) == []


async def test_a_file_stays_while_a_batch_reads_it(jobs: Jobs) -> None:
    file = await add(jobs.store)
    await create(jobs, file)
    with pytest.raises(JobConflictError, match="still reads the file"):
        await jobs.files.delete("", file)
    batch = await jobs.batches.claim("a")
    assert batch is not None
    await jobs.batches.end("a", batch, Status.FAILED)
    await jobs.files.delete("", file)


async def test_a_batch_needs_a_file_of_its_owner(jobs: Jobs) -> None:
    file = await add(jobs.store)
    with pytest.raises(JobNotFoundError) as caught:
        await create(jobs, file, "another")
    assert caught.value.param == "input_file_id"


async def test_batches_are_bounded_until_they_are_erased(jobs: Jobs, time: Time) -> None:
    for _ in range(5):
        await create(jobs)
    with pytest.raises(JobLimitError, match="max_num_batches"):
        await create(jobs)
    batch = await jobs.batches.claim("a")
    assert batch is not None
    await jobs.batches.end("a", batch, Status.FAILED)
    time.now_s += JobsConfig().expires_after_s + 1
    await jobs.batches.expire()
    await create(jobs)


async def test_pages_follow_each_other_in_both_orders(jobs: Jobs) -> None:
    ids = [(await create(jobs)).id for _ in range(5)]
    for is_descending in (True, False):
        found: list[str] = []
        has_more = True
        while has_more:
            page = Page(found[-1] if found else None, 2, is_descending)
            batches, has_more = await jobs.batches.page("", page)
            found += [each.id for each in batches]
        assert found == (ids[::-1] if is_descending else ids)
    with pytest.raises(JobNotFoundError):
        await jobs.batches.page("another", Page(ids[0], 2))
