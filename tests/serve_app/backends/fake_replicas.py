"""Fake replicas that continue a known text exactly, and are lost at chosen points."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from deployments.contract.descriptions import ModelDescription, PoolerDescription
from deployments.contract.errors import RaystreamError, ReplicaUnavailableError
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.generation import (
    Accepted,
    GenerationRequest,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.pooling import PooledText, PoolingRequest
from deployments.contract.sampling_params import SamplingParams
from serve_app.backends.replicas.replica_departures import Departure, OnDue
from serve_app.backends.streams.failover import Failover
from serve_app.backends.streams.parking import ParkingLot
from serve_app.backends.streams.retries import FailoverLimits
from tests.serve_app.by_method import ByMethod
from tests.serve_app.fake_pooler import as_row

if TYPE_CHECKING:
    from serve_app.backends.replicas.replica_departures import Departures

GONE = ReplicaUnavailableError("gone")


@dataclass(frozen=True)
class Fate:
    """What happens to one attempt."""

    num_tokens: int | None = None  # how many tokens come before the end; None lets the text finish
    # How it ends then; None ends the call without a finish. It also ends a stream that has
    # finished.
    error: RaystreamError | None = GONE
    opening_error: RaystreamError | None = None  # raised in place of a stream
    waits_for: asyncio.Event | None = None  # waited for before the replica answers
    num_together: int = 1  # deltas in one list
    # The index of a token that never comes; a reader waits until the stream is closed.
    stands_before: int | None = None


class Replicas(ByMethod):
    """A model with one text; each attempt meets the next fate, and after these none is lost."""

    def __init__(
        self,
        num_tokens: int = 6,
        fates: Sequence[Fate] = (),
        read_errors: Sequence[RaystreamError] = (),
    ) -> None:
        self.num_tokens = num_tokens
        self.start_s = 0.0  # how long each took to start, as it tells
        self.read_errors = list(read_errors)
        self.num_reads = 0
        self.fates = list(fates)
        self.requests: list[GenerationRequest] = []
        self.streams: list[Stream] = []
        self._watches: dict[str, OnDue] = {}
        self.turn_is_over = False
        self.num_open = 0
        self.num_opening = 0
        self.opens = asyncio.Event()  # set at the first request whose replica must be waited for

    async def generate(self, request: GenerationRequest) -> "Stream":
        self.requests.append(request)
        fate = self.fates.pop(0) if self.fates else Fate()
        self.num_opening += 1
        try:
            await asyncio.sleep(0)
            if fate.waits_for is not None:
                self.opens.set()
                await fate.waits_for.wait()
        finally:
            self.num_opening -= 1
        if fate.opening_error is not None:
            raise fate.opening_error
        self.num_open += 1
        self.streams.append(Stream(self, request, fate, f"replica {len(self.streams)}"))
        return self.streams[-1]

    def outlived(self, limits: FailoverLimits, lot: ParkingLot | None = None) -> Failover:
        """Return the model as one that outlives its replicas, and hears which are about to end."""
        return Failover(self, limits, departures=cast("Departures", self), lot=lot)

    def watch(self, replica_id: str, on_due: OnDue) -> Callable[[], object]:
        self._watches[replica_id] = on_due
        return lambda: self._watches.pop(replica_id, None)

    def leave(self, index: int, departure: Departure = Departure.MOVE) -> None:
        """Say that a stream's replica is about to end."""
        on_due = self._watches.get(self.streams[index].accepted.replica_id)
        if on_due is not None:
            on_due(departure)

    async def is_turn_over(self, _: str) -> bool:
        return self.turn_is_over

    def _read(self) -> None:
        self.num_reads += 1
        if self.read_errors:
            raise self.read_errors.pop(0)

    async def describe(self) -> ModelDescription:
        self._read()
        return ModelDescription("m", 1, 128, False, SamplingParams())

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        self._read()
        return TokenizedPrompt((1,))

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        self._read()
        return "a"

    async def ping(self) -> None:
        pass


class Stream:
    """A stream of a text whose i-th token is 100 + i."""

    waited_until_s = 0.0

    def __init__(
        self, replicas: Replicas, request: GenerationRequest, fate: Fate, replica_id: str
    ) -> None:
        # Every replica has encoded the same prompt; the second number would show a mix-up.
        self.accepted = (
            Accepted(99, replica_id, PromptReasoning.OPEN, None, "fp_fake", b"prompt")
            if request.is_resumed
            else Accepted(7, replica_id, PromptReasoning.BEGUN, None, "fp_fake", b"prompt")
        )
        self.accepted = replace(self.accepted, start_s=replicas.start_s)
        self.stands = asyncio.Event()
        self._closed = asyncio.Event()
        self._replicas = replicas
        self._first = len(request.generated_token_ids)
        self._fate = fate
        self._is_open = True

    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        fate, num_tokens = self._fate, self._replicas.num_tokens
        end = num_tokens if fate.num_tokens is None else self._first + fate.num_tokens
        deltas = [self._delta(index) for index in range(self._first, min(end, num_tokens))]
        for start in range(0, len(deltas), fate.num_together):
            await asyncio.sleep(0)
            if self._first + start == fate.stands_before:
                self.stands.set()
                await self._closed.wait()
                raise GONE
            yield deltas[start : start + fate.num_together]
        if fate.error is not None:
            raise fate.error
        if not deltas or deltas[-1].finish_reason is None:
            raise ReplicaUnavailableError("the call has ended")

    def _delta(self, index: int) -> TextDelta:
        is_last = index == self._replicas.num_tokens - 1
        return TextDelta(
            (100 + index,),
            f"<{index}>",
            FinishReason.LENGTH if is_last else None,
            num_cached_tokens=3 + self._first if index == self._first else 0,
        )

    async def aclose(self) -> None:
        self._closed.set()
        if self._is_open:
            self._is_open = False
            self._replicas.num_open -= 1


class Classifiers(ByMethod):
    """A classifier that is lost as often as there are errors."""

    def __init__(self, *errors: RaystreamError) -> None:
        self.errors = list(errors)
        self.read_errors: list[RaystreamError] = []
        self.requests: list[PoolingRequest] = []

    async def pool(self, request: PoolingRequest) -> tuple[PooledText, ...]:
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        return (PooledText(as_row((1.0,)), 3),)

    async def describe(self) -> PoolerDescription:
        if self.read_errors:
            raise self.read_errors.pop(0)
        return PoolerDescription("c", 1, 8, ("a",), False)

    async def ping(self) -> None:
        pass
