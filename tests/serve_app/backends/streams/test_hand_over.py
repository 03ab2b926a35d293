"""Streams whose replica is about to end: they open at another before they leave."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pytest

from deployments.contract.errors import (
    GenerationFailedError,
    ModelChangedError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import GenerationRequest
from deployments.contract.sampling_params import SamplingParams
from deployments.contract.telemetry.tracing import TraceContext
from serve_app.backends.replicas.replica_errors import ReplicaStoppedError
from serve_app.backends.streams.failover_stream import FailoverStream
from serve_app.backends.streams.retries import FailoverLimits
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from serve_app.http.stream_notices import Notice
from tests.serve_app.backends.fake_replicas import GONE, Fate, Replicas
from tests.serve_app.read_stream import read_to_end
from tests.stopped_clock import settle

REQUEST = GenerationRequest("r", "hi", SamplingParams(max_tokens=6))
# No pause of the machine is as long as this patience.
LIMITS = FailoverLimits(timeout_s=30, first_backoff_s=0, max_backoff_s=0, first_patience_s=10)
TOKEN_IDS = tuple(range(100, 106))
STANDS = Fate(stands_before=2)


@asynccontextmanager
async def opened(
    replicas: Replicas, limits: FailoverLimits = LIMITS
) -> AsyncIterator[FailoverStream]:
    stream = await replicas.outlived(limits).send(REQUEST)
    assert isinstance(stream, FailoverStream)
    async with asyncio.timeout(30), aclosing(stream):
        yield stream
    assert (replicas.num_open, replicas.num_opening) == (0, 0)


@asynccontextmanager
async def leaving(
    replicas: Replicas, limits: FailoverLimits = LIMITS
) -> AsyncIterator[FailoverStream]:
    """Open a stream whose replica is about to end behind its first token."""
    async with opened(replicas, limits) as stream:
        await anext(stream)
        replicas.leave(0)
        yield stream


async def test_a_reader_that_waits_goes_on_at_the_next_replica() -> None:
    replicas = Replicas(fates=[STANDS])
    async with opened(replicas) as stream:
        whole = asyncio.create_task(read_to_end(stream))
        await replicas.streams[0].stands.wait()
        replicas.leave(0)
        assert (await whole).token_ids == TOKEN_IDS
    first, second = replicas.requests
    assert second == replace(
        first,
        generated_token_ids=TOKEN_IDS[:2],
        is_resumed=True,
        is_planned=True,
        fingerprint="fp_fake",
    )


async def test_a_stream_moves_while_nobody_reads_it() -> None:
    replicas = Replicas()
    async with leaving(replicas) as stream:
        await settle()
        assert replicas.num_open == 1
        assert len(replicas.streams) == 2
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS[1:]


async def test_nothing_is_passed_on_until_the_next_replica_has_answered() -> None:
    opens = asyncio.Event()
    replicas = Replicas(fates=[Fate(), Fate(waits_for=opens)])
    async with leaving(replicas) as stream:
        await settle()
        reading = asyncio.ensure_future(anext(stream))
        await settle()
        assert not reading.done()
        opens.set()
        assert (await reading)[0].token_ids == (101,)
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS[2:]
    assert replicas.requests[1].generated_token_ids == (100,)


@pytest.mark.parametrize(
    "refusal", [OverloadedError("no slot"), ModelChangedError("other"), ReplicaStoppedError("stop")]
)
async def test_a_stream_that_no_replica_takes_stays_and_tries_again(
    refusal: RaystreamError,
) -> None:
    replicas = Replicas(fates=[Fate(), Fate(opening_error=refusal)])
    async with leaving(replicas) as stream:
        await settle()
        assert (await anext(stream))[0].token_ids == (101,)
        replicas.leave(0)
        await settle()
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS[2:]
    assert [each.generated_token_ids for each in replicas.requests] == [(), (100,), (100, 101)]


async def test_a_replica_that_hangs_gets_no_stream() -> None:
    replicas = Replicas(fates=[Fate(), Fate(waits_for=asyncio.Event())])
    async with leaving(replicas, replace(LIMITS, first_patience_s=0.01)) as stream:
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS[1:]
    assert len(replicas.streams) == 1


async def test_a_replica_that_dies_of_the_request_is_the_last_to_be_tried() -> None:
    replicas = Replicas(fates=[Fate(), Fate(opening_error=GONE)])
    async with opened(replicas) as stream:
        await anext(stream)
        for _ in range(2):
            replicas.leave(0)
            await settle()
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS[1:]
    assert len(replicas.requests) == 2


async def test_a_suspect_stays() -> None:
    replicas = Replicas(fates=[Fate(0)])
    async with opened(replicas) as stream:
        await anext(stream)
        replicas.leave(1)
        await settle()
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS[1:]
    assert [each.num_deaths for each in replicas.requests] == [0, 1]


async def test_a_text_that_ends_meanwhile_does_not_move() -> None:
    replicas = Replicas(num_tokens=2, fates=[Fate(), Fate(waits_for=asyncio.Event())])
    async with leaving(replicas) as stream:
        await replicas.opens.wait()
        assert (await read_to_end(stream)).token_ids == (101,)
    assert len(replicas.streams) == 1


async def test_a_text_that_has_failed_does_not_move() -> None:
    replicas = Replicas(fates=[Fate(2, error=GenerationFailedError("out of memory"))])
    async with opened(replicas) as stream:
        with pytest.raises(GenerationFailedError):
            async for _ in stream:
                pass
        replicas.leave(0)
        await settle()
    assert len(replicas.requests) == 1


async def test_a_stream_that_is_closed_while_it_is_read_is_not_taken_for_complete() -> None:
    replicas = Replicas(fates=[STANDS])
    async with opened(replicas) as stream:
        reading = asyncio.ensure_future(read_to_end(stream))
        await replicas.streams[0].stands.wait()
        await stream.aclose()
        with pytest.raises(ReplicaUnavailableError, match="before it was finished"):
            await reading


async def check_that_a_death_meanwhile_loses_nothing(
    replicas: Replicas, opens: asyncio.Event
) -> None:
    """Let a replica die behind the second token, while the next one has not opened the stream."""
    async with opened(replicas) as stream:
        await anext(stream)
        await anext(stream)
        replicas.leave(0)
        await replicas.opens.wait()
        whole = asyncio.create_task(read_to_end(stream))
        await settle()
        opens.set()
        assert (await whole).token_ids == TOKEN_IDS[2:]


async def test_a_replica_that_dies_meanwhile_loses_nothing() -> None:
    opens = asyncio.Event()
    replicas = Replicas(fates=[Fate(2), Fate(waits_for=opens)])
    await check_that_a_death_meanwhile_loses_nothing(replicas, opens)
    assert [each.num_deaths for each in replicas.requests] == [0, 0]


async def test_a_replica_that_dies_while_none_takes_the_stream_is_a_death() -> None:
    opens = asyncio.Event()
    full = Fate(waits_for=opens, opening_error=OverloadedError("no slot"))
    replicas = Replicas(fates=[Fate(2), full])
    await check_that_a_death_meanwhile_loses_nothing(replicas, opens)
    assert [each.is_planned for each in replicas.requests] == [False, True, False]


async def test_closing_a_stream_that_moves_leaves_nothing_open() -> None:
    replicas = Replicas(fates=[Fate(), Fate(waits_for=asyncio.Event())])
    async with leaving(replicas):
        await replicas.opens.wait()


async def test_planned_moves_are_told_but_not_bounded() -> None:
    record = RequestRecord("r", "POST", lambda: 0.0, 0.0)
    notices: list[str] = []
    record.on_notice = notices.append
    token = CURRENT_RECORD.set(record)
    try:
        replicas = Replicas(num_tokens=20)
        async with opened(replicas, replace(LIMITS, max_moves=1)) as stream:
            for _ in range(5):
                await anext(stream)
                replicas.leave(-1)
                await settle()
            assert len((await read_to_end(stream)).token_ids) == 15
    finally:
        CURRENT_RECORD.reset(token)
    assert record.num_moves == 5
    assert notices == [Notice.MOVED] * 5


async def test_the_trace_of_a_planned_move_names_its_reason() -> None:
    trace = TraceContext("00-1-2-01")
    replicas = Replicas()
    backend = replicas.outlived(LIMITS)
    stream = await backend.send(replace(REQUEST, trace=trace))
    async with asyncio.timeout(30), aclosing(stream):
        await anext(aiter(stream))
        replicas.leave(0)
        await settle()
    assert [each.trace for each in replicas.requests] == [trace, replace(trace, moved="drained")]


async def test_only_some_streams_move_at_the_same_time() -> None:
    opens = asyncio.Event()
    num_streams = 20
    replicas = Replicas(fates=[Fate()] * num_streams + [Fate(waits_for=opens)] * num_streams)
    backend = replicas.outlived(LIMITS)
    streams = [await backend.send(REQUEST) for _ in range(num_streams)]
    for each in list(replicas.streams):
        replicas.leave(replicas.streams.index(each))
    await settle()
    assert replicas.num_opening == 16
    opens.set()
    for stream in streams:
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS
    assert len(replicas.requests) == 2 * num_streams


async def test_a_version_that_is_gone_is_the_reason_that_a_lost_stream_ends() -> None:
    gone = ModelChangedError("another version")
    replicas = Replicas(fates=[Fate(2), *[Fate(opening_error=gone)] * 1000])
    limits = FailoverLimits(timeout_s=0.02, first_backoff_s=0.001, max_backoff_s=0.001)
    async with opened(replicas, limits) as stream:
        with pytest.raises(ModelChangedError):
            await read_to_end(stream)


async def test_a_version_that_comes_back_takes_the_stream() -> None:
    gone = ModelChangedError("another version")
    replicas = Replicas(fates=[Fate(2), *[Fate(opening_error=gone)] * 3])
    async with opened(replicas) as stream:
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS


async def test_a_lost_replica_is_left_even_if_it_was_about_to_end() -> None:
    replicas = Replicas(fates=[Fate(2), Fate(opening_error=ReplicaUnavailableError("gone"))])
    async with leaving(replicas) as stream:
        await settle()
        assert (await read_to_end(stream)).token_ids == TOKEN_IDS[1:]
    assert [each.num_deaths for each in replicas.requests] == [0, 0, 0]
