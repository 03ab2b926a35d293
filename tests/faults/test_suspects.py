"""Suspects over real channels: what a poison prompt kills, whatever gets lost with the replicas.

The replicas are fakes in this process that die, or hang, at chosen points of the handshake.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ray.exceptions import ActorDiedError

from deployments.channel.server import ChannelServer
from deployments.contract.errors import GenerationFailedError
from deployments.contract.generation import Accepted, GenerationEvent, GenerationRequest, Started
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from raystream.local_handle import LocalHandle
from serve_app.backends.replicas import token_channels
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.backends.streams.failover import Failover
from serve_app.backends.streams.retries import FailoverLimits
from tests.serve_app.read_stream import read_to_end

pytestmark = pytest.mark.in_time


if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

REQUEST = GenerationRequest("r", "hi", SamplingParams())
LAST = TextDelta((1,), "a", FinishReason.STOP)
LIMITS = FailoverLimits(
    timeout_s=30, first_backoff_s=0, max_backoff_s=0.001, first_patience_s=0.005
)


class Fate(Enum):
    """How a suspect's attempt goes at a replica, if the suspect itself does not kill that."""

    IS_ANSWERED = "it begins and is answered"
    WAITS_LONG = "it begins, and is answered after more than the first patience"
    IS_LOST_WAITING = "the replica dies while the suspect waits for its turn"
    START_IS_LOST = "the replica dies before its `Started` arrives"
    IS_CUT_OFF = "`Started` arrives, but the replica can no longer be reached"
    HANGS = "the replica does not answer until the call is cancelled"
    IS_STOPPED = "the replica is stopped after the go-ahead"


class Replicas:
    """Replicas of one model; each call reaches a new one, and meets the next fate."""

    def __init__(self, fates: Sequence[Fate], kills: Callable[[int], bool]) -> None:
        """Plan the fates of the suspect's attempts; after these, all are answered.

        `kills` says whether the request kills, by the number of replicas that have begun before.
        """
        self.num_begun = 0
        self.num_killed = 0
        self.num_running = 0
        self.all_channels: list[ChannelServer] = []
        self._fates = list(fates)
        self._kills = kills

    async def generate(
        self, request: GenerationRequest
    ) -> AsyncGenerator[list[GenerationEvent], None]:
        channels = ChannelServer("127.0.0.1")
        self.all_channels.append(channels)
        try:
            fate = self._fates.pop(0) if request.num_deaths and self._fates else Fate.IS_ANSWERED
            events = self._generate(request, channels, fate)
            async with aclosing(events):
                async for each in events:
                    yield each
        except ActorDiedError:
            channels.close()
            raise

    async def _generate(
        self, request: GenerationRequest, channels: ChannelServer, fate: Fate
    ) -> AsyncGenerator[list[GenerationEvent], None]:
        if request.num_deaths:
            with channels.go_aheads.expect() as go_ahead:
                await self._suffer(fate)
                started = Started(await channels.address(), go_ahead.number)
                if fate is Fate.IS_CUT_OFF:
                    channels.close()
                yield [started]
                if not await go_ahead.is_given():
                    return
        self.num_running += 1
        assert self.num_running == 1, "it runs at two replicas at once"
        try:
            await self._begin(fate)
            assert request.stream is not None
            with channels.stream(request.stream) as stream:
                yield [Accepted(3, "replica", channel=await channels.address())]
                stream.put(LAST)
                channels.flush()
                await stream.wait_until_ended()
        finally:
            self.num_running -= 1

    async def _suffer(self, fate: Fate) -> None:
        if fate in (Fate.IS_LOST_WAITING, Fate.START_IS_LOST):
            raise ActorDiedError
        if fate is Fate.HANGS:
            await asyncio.Event().wait()

    async def _begin(self, fate: Fate) -> None:
        self.num_begun += 1
        if self._kills(self.num_begun):
            self.num_killed += 1
            raise ActorDiedError
        if fate is Fate.IS_STOPPED:
            raise asyncio.CancelledError
        if fate is Fate.WAITS_LONG:
            await asyncio.sleep(3 * LIMITS.first_patience_s)


async def answer(replicas: Replicas) -> TextDelta:
    handle = cast("DeploymentHandle[Any]", LocalHandle(replicas))
    try:
        async with aclosing(HandleBackend(handle)) as backend:
            model = Failover(backend, LIMITS)
            return await read_to_end(await model.send(REQUEST))
    finally:
        for channels in replicas.all_channels:
            channels.close()


@given(st.lists(st.sampled_from(Fate), max_size=6))
@example([Fate.START_IS_LOST, Fate.IS_ANSWERED])
@settings(max_examples=60)
async def test_a_prompt_that_kills_kills_two_replicas_whatever_is_lost(fates: list[Fate]) -> None:
    replicas = Replicas(fates, kills=lambda num_begun: True)
    with pytest.raises(GenerationFailedError, match="2 replicas"):
        await answer(replicas)
    assert (replicas.num_begun, replicas.num_killed) == (2, 2)


@given(st.lists(st.sampled_from(Fate), max_size=6))
@example([Fate.WAITS_LONG])
@settings(max_examples=60)
async def test_a_prompt_that_only_waits_where_replicas_die_is_answered(fates: list[Fate]) -> None:
    replicas = Replicas(fates, kills=lambda num_begun: num_begun == 1)
    assert await answer(replicas) == LAST
    assert replicas.num_killed == 1


async def test_a_replica_that_falls_silent_after_the_go_ahead_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_channels, "TICK_S", 0.01)
    replicas = Replicas([], kills=lambda num_begun: num_begun == 1)

    async def hang(fate: Fate) -> None:
        await begin(fate)
        await asyncio.Event().wait()

    begin = replicas._begin
    monkeypatch.setattr(replicas, "_begin", hang)
    with pytest.raises(GenerationFailedError, match="2 replicas"):
        await answer(replicas)
    assert replicas.num_begun == 2
