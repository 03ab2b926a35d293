"""Streams of a replica in this process: Serve's call as a fake, the channel as it is."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
from ray.exceptions import ActorDiedError

from deployments.channel import go_ahead
from deployments.channel.outbox import OutgoingStream
from deployments.channel.server import ChannelServer
from deployments.contract.claims import Claim
from deployments.contract.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    GenerationStream,
    Started,
)
from deployments.contract.output import FinishReason, PromptLogprobs, TextDelta
from deployments.contract.sampling_params import SamplingParams
from serve_app.backends.replicas import replica_stream, token_channels
from serve_app.backends.replicas.replica_departures import Departure, OnDue
from serve_app.backends.replicas.replica_errors import LostAfterStartError, ReplicaStoppedError
from serve_app.backends.streams.failover import Failover
from serve_app.backends.streams.retries import FailoverLimits
from tests.deployments.local_handle import local_backend
from tests.stopped_clock import settle

pytestmark = pytest.mark.in_time


if TYPE_CHECKING:
    from serve_app.backends.replicas.replica_departures import Departures

REQUEST = GenerationRequest("r", "hi", SamplingParams())
FIRST, LAST = TextDelta((1,), "a"), TextDelta((2,), "b", FinishReason.STOP)


class Replica:
    """Accepts each request; the test says what its streams gain."""

    def __init__(self) -> None:
        self.backend = local_backend(self)
        self.channels = ChannelServer("127.0.0.1")
        self.requests: list[GenerationRequest] = []
        self.streams: list[OutgoingStream] = []
        self.num_running = 0
        self.is_suspicious = False
        self.num_begun = 0
        self.error: Exception | None = None
        self.failing = asyncio.Event()
        self.idle = asyncio.Event()

    def gain(self, *deltas: TextDelta) -> None:
        """Let the newest stream gain deltas, one step each."""
        for delta in deltas:
            self.streams[-1].put(delta)
            self.channels.flush()

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[list[GenerationEvent], None]:
        assert request.stream is not None
        self.requests.append(request)
        self.num_running += 1
        self.idle.clear()
        try:
            address = await self.channels.address()
            if self.is_suspicious:
                with self.channels.go_aheads.expect() as go_ahead:
                    yield [Started(address, go_ahead.number)]
                    if not await go_ahead.is_given():
                        return
                    self.num_begun += 1
                    await self.begin()
            with self.channels.stream(request.stream) as stream:
                self.streams.append(stream)
                yield [Accepted(3, "replica", channel=address)]
                await self._run(stream)
        finally:
            self.num_running -= 1
            self.idle.set()

    async def begin(self) -> None:
        """Do what comes between the go-ahead and the acceptance."""

    async def _run(self, stream: OutgoingStream) -> None:
        failing = asyncio.ensure_future(self.failing.wait())
        ending = asyncio.ensure_future(stream.wait_until_ended())
        try:
            await asyncio.wait([failing, ending], return_when=asyncio.FIRST_COMPLETED)
        finally:
            failing.cancel()
            ending.cancel()
        if self.error is not None:
            raise self.error


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    yield made
    await made.backend.aclose()
    made.channels.close()


async def rest_of(stream: GenerationStream) -> TextDelta:
    return TextDelta.join([delta async for deltas in stream for delta in deltas])


async def test_a_stream_ends_with_its_last_delta_and_its_call_is_read_to_its_end(
    replica: Replica,
) -> None:
    stream = await replica.backend.send(REQUEST)
    assert stream.accepted.num_prompt_tokens == 3
    replica.gain(FIRST, LAST)
    assert await rest_of(stream) == TextDelta.join([FIRST, LAST])
    await replica.idle.wait()
    await stream.aclose()


async def test_a_stream_whose_reader_stops_early_is_cancelled(replica: Replica) -> None:
    stream = await replica.backend.send(REQUEST)
    replica.gain(FIRST)
    assert await anext(aiter(stream)) == [FIRST]
    await stream.aclose()
    await stream.aclose()
    await replica.idle.wait()
    other = await replica.backend.send(REQUEST)
    replica.gain(LAST)
    assert await rest_of(other) == LAST


async def test_what_a_stream_passes_on_is_told_to_the_replica_that_is_asked_next(
    replica: Replica,
) -> None:
    mine = replace(REQUEST, claim=Claim(tenant="mine"))
    stream = await replica.backend.send(mine)
    replica.gain(
        TextDelta((), "", prompt_logprobs=(PromptLogprobs(None, 0, b"", b"", b"", ()),)),
        TextDelta((1, 2), "ab", num_cached_tokens=1),
    )
    assert len(await anext(aiter(stream))) <= 2
    replica.gain(LAST)
    await rest_of(stream)
    # Two of three tokens of the prompt were computed; each of the answer costs two.
    begun = replace(mine, is_resumed=True, generated_token_ids=(1,))
    for request, expected in ((mine, 8.0), (begun, 8.0), (REQUEST, 0.0)):
        async with aclosing(await replica.backend.send(request)) as stream:
            claim = replica.requests[-1].claim
            assert (claim.tenant, claim.num_served) == (request.claim.tenant, expected)
            assert claim.ingress == replica.backend._channels.channel_id
            replica.gain(LAST)
            if request.is_resumed:
                await rest_of(stream)
    assert replica.backend.shares.served(mine.claim) == 10, "its prompt was counted elsewhere"
    async with aclosing(await replica.backend.send(replace(mine, is_resumed=True))) as stream:
        replica.gain(LAST)
        await rest_of(stream)
    assert replica.backend.shares.served(mine.claim) == 10 + 3 + 2, "no token came elsewhere"


async def test_a_replica_is_told_whether_the_tenant_has_waited_without_a_break(
    replica: Replica,
) -> None:
    mine = replace(REQUEST, claim=Claim(tenant="mine"))
    streams = [await replica.backend.send(mine) for _ in range(2)]
    for stream, outgoing in zip(streams, tuple(replica.streams), strict=True):
        outgoing.put(FIRST)
        replica.channels.flush()
        assert await anext(aiter(stream)) == [FIRST]
        async with aclosing(await replica.backend.send(mine)):
            pass
    backlogs = [request.claim.backlog for request in replica.requests]
    assert backlogs == [1, 1, 1, 2], "the third came while the second waited"
    for stream in streams:
        await stream.aclose()


async def test_each_reader_gets_only_its_own_deltas(replica: Replica) -> None:
    streams = [await replica.backend.send(REQUEST) for _ in range(20)]
    for step in range(10):
        for number, outgoing in enumerate(replica.streams):
            outgoing.put(TextDelta((number,), f"{step}", LAST.finish_reason if step == 9 else None))
        replica.channels.flush()
    found = await asyncio.gather(*map(rest_of, streams))
    assert [delta.token_ids for delta in found] == [(number,) * 10 for number in range(20)]
    assert {delta.text for delta in found} == {"0123456789"}


async def test_a_replica_that_is_lost_ends_its_streams_after_what_has_arrived(
    replica: Replica,
) -> None:
    stream = await replica.backend.send(REQUEST)
    replica.gain(FIRST)
    replica.channels.close()
    deltas = aiter(stream)
    assert await anext(deltas) == [FIRST]
    with pytest.raises(ReplicaUnavailableError):
        await anext(deltas)
    await replica.idle.wait()  # its call was cancelled


@pytest.mark.parametrize(
    ("last", "raised"),
    [
        (TextDelta((), "", FinishReason.ABORT), GenerationAbortedError),
        (TextDelta((), "", FinishReason.ERROR, "out of memory"), GenerationFailedError),
    ],
)
async def test_a_stream_that_was_cut_gives_its_deltas_and_then_an_error(
    replica: Replica, last: TextDelta, raised: type[RaystreamError]
) -> None:
    stream = await replica.backend.send(REQUEST)
    deltas = aiter(stream)
    replica.gain(FIRST, TextDelta((5,), "c"), last)
    found = await anext(deltas)
    if len(TextDelta.join(found).token_ids) == 1:
        found += await anext(deltas)
    assert TextDelta.join(found) == TextDelta((1, 5), "ac", error=last.error)
    for _ in range(2):
        with pytest.raises(raised, match=last.error or "aborted"):
            await anext(deltas)


async def test_a_text_whose_failure_is_not_read_yet_does_not_leave_its_replica(
    replica: Replica,
) -> None:
    watches: dict[str, OnDue] = {}

    class Departing:
        def watch(self, replica_id: str, on_due: OnDue) -> Callable[[], object]:
            watches[replica_id] = on_due
            return lambda: watches.pop(replica_id, None)

    departures = cast("Departures", Departing())
    model = Failover(replica.backend, FailoverLimits(timeout_s=30), departures=departures)
    stream = await model.send(REQUEST)
    leave = watches["replica"]
    replica.gain(TextDelta((5,), "c", FinishReason.ERROR, "out of memory"))
    deltas = aiter(stream)
    assert TextDelta.join(await anext(deltas)).token_ids == (5,)
    leave(Departure.MOVE)
    await settle()
    assert (len(replica.streams), watches) == (1, {})
    with pytest.raises(GenerationFailedError, match="out of memory"):
        await anext(deltas)


async def test_a_failed_call_ends_its_stream_as_aborted(replica: Replica) -> None:
    stream = await replica.backend.send(REQUEST)
    replica.error = KeyError("a bug")
    replica.failing.set()
    with pytest.raises(GenerationAbortedError):
        await rest_of(stream)


async def test_a_call_that_ends_without_a_last_delta_does_not_hang(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_stream, "LAST_DELTA_TIMEOUT_S", 0.0)
    stream = await replica.backend.send(REQUEST)
    (outbox,) = replica.channels._outboxes.values()
    outbox.is_paused = True  # whatever the replica has to say is not sent
    replica.error = ActorDiedError()
    replica.failing.set()
    with pytest.raises(ReplicaUnavailableError):
        await rest_of(stream)


async def test_a_replica_whose_channel_cannot_be_reached_is_unavailable_and_its_call_cancelled(
    replica: Replica,
) -> None:
    await replica.channels.address()
    replica.channels.close()
    with pytest.raises(LostAfterStartError):
        await replica.backend.send(REQUEST)
    await replica.idle.wait()


async def test_a_suspect_begins_with_its_go_ahead(replica: Replica) -> None:
    replica.is_suspicious = True
    stream = await replica.backend.send(REQUEST)
    assert replica.num_begun == 1
    async with aclosing(stream):
        replica.gain(LAST)
        assert await rest_of(stream) == LAST


async def test_a_suspect_whose_replica_cannot_be_reached_has_not_begun(replica: Replica) -> None:
    replica.is_suspicious = True
    await replica.channels.address()
    replica.channels.close()
    with pytest.raises(ReplicaUnavailableError) as caught:
        await replica.backend.send(REQUEST)
    assert not isinstance(caught.value, LostAfterStartError)
    await replica.idle.wait()
    assert replica.num_begun == 0


async def test_a_suspect_whose_replica_did_not_hear_its_go_ahead_in_time_has_not_begun(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(go_ahead, "TICK_S", 0.0)
    replica.is_suspicious = True
    with pytest.raises(ReplicaUnavailableError) as caught:
        await replica.backend.send(REQUEST)
    assert not isinstance(caught.value, LostAfterStartError)
    assert replica.num_begun == 0


@pytest.mark.parametrize("call_ends", [True, False], ids=["dies", "falls silent"])
async def test_a_suspect_whose_replica_is_lost_after_the_go_ahead_has_begun(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, call_ends: bool
) -> None:
    async def die() -> None:
        if call_ends:
            raise ActorDiedError
        replica.channels.close()
        await asyncio.Event().wait()

    monkeypatch.setattr(token_channels, "CALL_END_TIMEOUT_S", 0.0)
    monkeypatch.setattr(replica, "begin", die)
    replica.is_suspicious = True
    with pytest.raises(LostAfterStartError):
        await replica.backend.send(REQUEST)
    await replica.idle.wait()  # its call was cancelled
    assert replica.num_begun == 1


async def test_a_suspect_s_call_may_say_after_the_channel_how_its_replica_has_ended(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop() -> None:
        replica.channels.close()
        (opening,) = replica.backend._channels._channels.values()
        await opening.result().closed
        raise asyncio.CancelledError  # as Serve ends the calls of a replica that it stops

    monkeypatch.setattr(replica, "begin", stop)
    replica.is_suspicious = True
    with pytest.raises(ReplicaStoppedError):
        await replica.backend.send(REQUEST)


async def test_an_engine_that_fails_is_no_graceful_end(replica: Replica) -> None:
    stream = await replica.backend.send(REQUEST)
    replica.gain(TextDelta((), "", FinishReason.ABORT, "the engine has failed"))
    with pytest.raises(ReplicaUnavailableError):
        await rest_of(stream)
