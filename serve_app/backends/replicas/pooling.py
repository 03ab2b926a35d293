"""Poolers, as surfaces see them: a Protocol, and Ray Serve's handles behind it."""

from dataclasses import replace
from typing import Protocol, cast

from deployments.contract.descriptions import PoolerDescription
from deployments.contract.gen_ai_spans import ModelSpans, recorded
from deployments.contract.pooling import Pooled, PooledText, PoolingEvent, PoolingRequest
from serve_app.backends.replicas.handles import (
    Handle,
    HandleBackend,
    Responses,
    first_answer,
    read_to_end,
)
from serve_app.backends.replicas.offers import raise_refusal
from serve_app.backends.replicas.running_replicas import RunningReplicas
from serve_app.http.request_record import seconds_since_arrival


class PoolingBackend(Protocol):
    """One model that classifies or embeds, wherever it runs."""

    async def pool(self, request: PoolingRequest) -> tuple[PooledText, ...]:
        """Return the row of each text, in order.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        ...

    async def describe(self) -> PoolerDescription:
        """Return what the model can do. Waits while its replicas load.

        Raises:
            RaystreamError: No replica could answer.
        """
        ...

    async def ping(self) -> None:
        """Exercise a replica's device worker.

        Raises:
            RaystreamError: The worker is not healthy, or no replica could answer.
        """
        ...


class HandlePoolingBackend(HandleBackend[PoolerDescription]):
    """A model that classifies or embeds, behind a Ray Serve handle; see `PoolingBackend`."""

    def __init__(
        self,
        handle: Handle,
        running: RunningReplicas | None = None,
        spans: ModelSpans | None = None,
    ) -> None:
        """Wrap a model's handle; see `HandleBackend`.

        Args:
            handle: See there.
            running: See there.
            spans: Starts the spans of calls; None starts none.
        """
        super().__init__(handle, running)
        self._spans = spans
        self._pool_suspect = handle.options(method_name="pool_suspect", stream=True)

    async def pool(self, request: PoolingRequest) -> tuple[PooledText, ...]:
        """Ask a replica; see `PoolingBackend.pool`."""
        pooled = await self._offer(lambda: self._pool(request))
        return pooled.texts

    async def _pool(self, request: PoolingRequest) -> Pooled:
        span = None if self._spans is None else self._spans.of_texts(request)
        with recorded(span):
            sent = replace(
                request,
                elapsed_s=seconds_since_arrival(),
                trace=None if span is None else span.context,
            )
            answer = await self._ask(sent)
            if span is not None:
                num_tokens = sum(each.num_tokens for each in answer.texts)
                span.accepted(num_tokens, answer.replica_id)
            return answer

    async def _ask(self, request: PoolingRequest) -> Pooled:
        """Return the answer of the replica that the router picks; see `_call`."""
        if not request.num_deaths:
            return cast("Pooled", await self._call("pool", request))
        call = self._pool_suspect.remote(request)
        responses = cast("Responses[PoolingEvent]", call)
        answer = await first_answer(responses, self._channels)
        await read_to_end(responses)
        raise_refusal(answer)
        assert isinstance(answer, Pooled), f"got a {type(answer).__name__}"
        return answer
