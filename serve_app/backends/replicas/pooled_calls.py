"""Pooled requests that go to their replica through its channel, without Serve's call.

Serve's router says which replicas run. Each of them is asked once where it listens, by a call that
goes to all of them at once. A request takes a channel only while each replica that takes requests
either has one or has lost it: a replica that has none yet would get no request. Until then, and
where no channel stands, the request is one of Serve's calls.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import Final

from deployments.contract.errors import RaystreamError, ReplicaUnavailableError
from deployments.contract.pooling import CallAddress, PoolingAnswer, PoolingRequest
from serve_app.backends.replicas.running_replicas import RunningReplicas
from serve_app.backends.replicas.token_channels import Channel, TokenChannels

ASK_INTERVAL_S: Final = 2.0
"""The least time from one question to the next, for replicas that have not answered the first."""

AskAddresses = Callable[[], Awaitable[tuple[object, ...]]]
"""Asks all running replicas where they listen; returns the answers that come in time."""


class PooledCalls:
    """The channels to the replicas of one model that classifies or embeds."""

    def __init__(
        self, ask: AskAddresses, channels: TokenChannels, running: RunningReplicas
    ) -> None:
        """Start without a channel.

        Args:
            ask: See `AskAddresses`.
            channels: Opens the channels.
            running: The model's replicas.
        """
        self._ask = ask
        self._channels = channels
        self._running = running
        self._by_replica: dict[str, Channel | None] = {}  # None: it takes Serve's calls only
        self._asked: frozenset[str] = frozenset()
        self._asked_s = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def send(self, request: PoolingRequest) -> PoolingAnswer | None:
        """Return a replica's answer; None if the request must be one of Serve's calls.

        Raises:
            RaystreamError: The replica has failed, or is lost.
        """
        channel = self._choose(request.refused_by)
        answer = None if channel is None else await channel.call(request)
        if channel is None or answer is None:
            return None
        if isinstance(answer.outcome, RaystreamError):
            raise answer.outcome
        return answer.outcome

    def _choose(self, refused_by: frozenset[str]) -> Channel | None:
        """Return the less busy of two channels, as Serve's router does; None if there is none.

        Args:
            refused_by: Replicas that are passed over.
        """
        ids = self._running.open_ids
        missing = self._missing(ids)
        if missing:
            self._look_for(missing)
        found = ((each, self._by_replica.get(each)) for each in ids)
        channels = {each: channel for each, channel in found if channel is not None}
        standing = ids - missing - refused_by
        if len(channels) < len(ids) or not standing:
            return None
        two = random.sample([channels[each] for each in standing], min(2, len(standing)))
        return min(two, key=lambda channel: channel.load)

    def _missing(self, ids: frozenset[str]) -> frozenset[str]:
        """Return those of these replicas that have no channel, or have lost it."""
        return frozenset(
            each
            for each in ids
            if each not in self._by_replica
            or ((channel := self._by_replica[each]) is not None and not channel.takes_calls)
        )

    def _look_for(self, missing: frozenset[str]) -> None:
        """Ask where these replicas listen, unless they were asked just now."""
        loop = asyncio.get_running_loop()
        is_early = missing == self._asked and loop.time() < self._asked_s + ASK_INTERVAL_S
        if self._asking is not None or is_early:
            return
        self._asked, self._asked_s = missing, loop.time()
        # An empty context: the channels outlive the request that opens them.
        self._asking = loop.create_task(self._find(), context=Context())
        self._asking.add_done_callback(self._end_asking)

    def _end_asking(self, _: object) -> None:
        self._asking = None

    async def _find(self) -> None:
        addresses = [each for each in await self._ask() if isinstance(each, CallAddress)]
        await asyncio.gather(*map(self._connect, addresses))
        running = self._running.ids
        self._by_replica = {id_: each for id_, each in self._by_replica.items() if id_ in running}
        self._asked = self._missing(self._asked)  # one that is lost later is asked at once

    async def _connect(self, address: CallAddress) -> None:
        if address.channel is None:
            self._by_replica[address.replica_id] = None
            return
        try:
            channel = await self._channels.reach(address.channel)
        except ReplicaUnavailableError:
            return  # its requests are Serve's calls
        self._by_replica[address.replica_id] = channel

    async def aclose(self) -> None:
        """Ask no more; the channels stay."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
