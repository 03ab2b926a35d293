"""A model that outlives its replicas: streams go on elsewhere, and calls are repeated.

`failover_stream` moves a stream; `retries` decides what follows from a loss, and `parking` when a
stream goes on that has made room for others.
"""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, Final

from deployments.contract.errors import (
    GenerationFailedError,
    PoolingFailedError,
    ReplicaUnavailableError,
)
from deployments.contract.generation import GenerationRequest, Request
from deployments.contract.pooling import PoolingRequest
from serve_app.backends.replicas.backend import AnswerT, Backend, PingRequest
from serve_app.backends.replicas.replica_departures import Departures
from serve_app.backends.streams.failover_stream import FailoverStream
from serve_app.backends.streams.parking import ParkingLot
from serve_app.backends.streams.retries import AskWhy, FailoverLimits, Retries, Starts, may_run

MAX_NUM_HAND_OVERS: Final = 16
"""Streams of one model that open at another replica at the same time, while theirs still runs."""


class _Noting:
    """A model whose replicas tell with each text how long they took to start."""

    def __init__(self, backend: Backend, starts: Starts) -> None:
        self._backend = backend
        self._starts = starts

    def send(self, request: Request[AnswerT]) -> Coroutine[Any, Any, AnswerT]:
        """Return the answer; see `Backend.send`."""
        return self._answer(request)

    async def _answer(self, request: Any) -> Any:
        answer = await self._backend.send(request)
        if isinstance(request, GenerationRequest):
            self._starts.note(answer.accepted.start_s)
        return answer


class Failover:
    """A model whose streams go on at another replica when theirs is lost."""

    def __init__(
        self,
        backend: Backend,
        limits: FailoverLimits,
        why_none: AskWhy = may_run,
        departures: Departures | None = None,
        lot: ParkingLot | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            backend: The model.
            limits: Limits on the search for another replica.
            why_none: See `Retries`.
            departures: Says which replicas are about to end; None: no replica ever is.
            lot: Holds its parked streams; None: none is ever parked.
        """
        self._starts = Starts()
        self._backend = _Noting(backend, self._starts)
        self._limits = limits
        self._why_none = why_none
        self._departures = departures
        self._lot = lot
        self._hand_overs = asyncio.Semaphore(MAX_NUM_HAND_OVERS)

    def send(self, request: Request[AnswerT]) -> Coroutine[Any, Any, AnswerT]:
        """Return the answer; see `Backend.send`.

        All requests but those for a text or for rows change nothing, and are simply repeated; a
        ping is not.

        Raises:
            GenerationFailedError: The request is taken for the cause of its replicas' deaths.
            OverloadedError: As many streams are parked as may be; see `ParkingLot.require_room`.
            PoolingFailedError: The same, of texts.
            RaystreamError: See `Backend.send`, `Retries.note_loss` and `Retries.until_taken`.
        """
        return self._answer(request)

    async def _answer(self, request: Any) -> Any:
        backend = self._backend
        retries_of = partial(Retries, self._limits, starts=self._starts, why_none=self._why_none)
        match request:
            case GenerationRequest():
                if self._lot is not None:
                    if not request.is_admitted:
                        self._lot.require_room(request.claim)
                    request = replace(request, may_park=True)
                retries = retries_of(GenerationFailedError, is_accepted=request.is_admitted)
                stream = await retries.until_taken(lambda: backend.send(retries.noted_in(request)))
                retries.is_accepted = True
                return FailoverStream(
                    backend,
                    request,
                    stream,
                    retries,
                    self._limits,
                    self._hand_overs,
                    self._departures,
                    self._lot,
                )
            case PoolingRequest():
                retries = retries_of(PoolingFailedError, is_accepted=True)
                return await retries.until_taken(lambda: backend.send(retries.noted_in(request)))
            case PingRequest():
                return await backend.send(request)
            case _:
                retries = retries_of(ReplicaUnavailableError, starts_at_once=True)
                return await retries.until_taken(lambda: backend.send(request))
