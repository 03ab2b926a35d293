"""A model behind a Ray Serve handle: each request is a call to a replica that the router picks.

A request for a text or for rows is offered to several replicas while these refuse it (`refusals`).
A text's call is accepted or refused, and ends with its sequence; the deltas come through the
channel to the replica (`token_channels`). A request for rows takes that channel in place of a call
where it stands (`pooled_calls`), but not while it waits for its model's turn. A call is cancelled
when its caller stops waiting.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, cast

from deployments.contract.claims import PRIORITY_AGING_S, Backlogs, Claim, FairShares, cost
from deployments.contract.errors import InvalidRequestError, ReplicaUnavailableError
from deployments.contract.gen_ai_spans import ModelSpans, end, recorded
from deployments.contract.generation import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    Refused,
    Request,
    TokenizeRequest,
)
from deployments.contract.pooling import Asleep, Pooled, PoolingEvent, PoolingRequest
from serve_app.backends.replicas.admission_queue import AdmissionQueue
from serve_app.backends.replicas.backend import (
    AnswerT,
    DescribeRequest,
    DetokenizeRequest,
    PingRequest,
)
from serve_app.backends.replicas.handles import (
    LOST,
    Handle,
    Response,
    Responses,
    ask_all,
    cancel,
    first_answer,
    read_to_end,
    translated_errors,
)
from serve_app.backends.replicas.pooled_calls import PooledCalls
from serve_app.backends.replicas.prefix_memory import prefix_keys
from serve_app.backends.replicas.refusals import raise_refusal, until_taken
from serve_app.backends.replicas.replica_errors import (
    LostAfterStartError,
    LostAsleepError,
    NotBegunError,
)
from serve_app.backends.replicas.replica_stream import ReplicaStream
from serve_app.backends.replicas.running_replicas import RunningReplicas
from serve_app.backends.replicas.token_channels import TokenChannels
from serve_app.http.request_record import seconds_since_arrival

MAX_LOST_ASLEEP: Final = 16
"""How many replicas may end, one after the other, while a call waits for them to wake, before that
counts as the loss of one: a model may die of each wake."""

LOST_BACKOFF_S: Final = 0.05
"""Before a lost call for rows is made again: Serve's router may not know yet of the death."""

ADDRESS_TIMEOUT_S: Final = 2.0
"""How long replicas have to say where they listen."""


class HandleBackend:
    """A model behind a Ray Serve handle; see `Backend`. A stream ends with its replica.

    Attributes:
        shares: What this ingress has passed on to each tenant.
    """

    def __init__(
        self,
        handle: Handle,
        running: RunningReplicas | None = None,
        spans: ModelSpans | None = None,
        priority_aging_s: float = PRIORITY_AGING_S,
    ) -> None:
        """Wrap a model's handle.

        Args:
            handle: The model's.
            running: Its replicas, as Serve's router knows them. The router looks for prefixes
                there. None: a request that is refused is offered to no other replica.
            spans: Starts the spans of calls; None starts none.
            priority_aging_s: Seconds of waiting that are worth one step of priority.
        """
        self._handle = handle
        # Made at once: with them Serve's router begins to say which replicas run.
        self._generate = handle.options(method_name="generate", stream=True)
        self._pool_in_turn = handle.options(method_name="pool_in_turn", stream=True)
        self._running = RunningReplicas() if running is None else running
        self._spans = spans
        self._channels = TokenChannels(os.environ)
        self._calls = PooledCalls(
            partial(ask_all, handle, "call_address", ADDRESS_TIMEOUT_S),
            self._channels,
            self._running,
        )
        self.shares = FairShares()
        self._backlogs = Backlogs()
        self._queue = AdmissionQueue(self.shares, priority_aging_s)

    def send(self, request: Request[AnswerT]) -> Coroutine[Any, Any, AnswerT]:
        """Ask a replica; see `Backend.send`.

        Requests that belong to admitted work skip the queue. So do suspects: a replica answers them
        when their turn has come, and others would wait behind them.
        """
        return self._answer(request)

    async def _answer(self, request: Any) -> Any:
        match request:
            case GenerationRequest():
                return await self._begun(request)
            case PoolingRequest():
                with ExitStack() as waiting:
                    waiting.callback(self._backlogs.enter(request.claim.tenant))
                    return await until_taken(partial(self._pool, request), self._running)
            case TokenizeRequest():
                return await self._call("tokenize", request)
            case DetokenizeRequest():
                return await self._call("detokenize", request.token_ids)
            case DescribeRequest():
                return await self._call("describe")
            case PingRequest():
                return await self._call("wake" if request.wakes else "ping")

    async def aclose(self) -> None:
        """Close the channels to all replicas; streams and calls that are still open fail."""
        await self._calls.aclose()
        await self._channels.aclose()

    async def _call(self, method: str, *args: object) -> Any:
        """Call a method of one replica and return its answer.

        Raises:
            RaystreamError: The replica has refused or failed; see `raise_refusal`.
        """
        answer = await self._ask(method, *args)
        raise_refusal(answer)
        return answer

    async def _ask(self, method: str, *args: object) -> object:
        """Return a replica's answer, which may be `Refused`.

        Raises:
            RaystreamError: The replica has failed.
        """
        response = cast("Response", getattr(self._handle, method).remote(*args))
        try:
            with translated_errors():
                return await response
        except BaseException:
            cancel(response)
            raise

    async def _begun(self, request: GenerationRequest) -> ReplicaStream:
        """Return the stream of the first replica that accepts a text, in its turn."""
        leave = self._backlogs.enter(request.claim.tenant)
        offer = partial(until_taken, partial(self._open, request, leave), self._running)
        skips = request.is_admitted or request.num_deaths
        try:
            return await (offer() if skips else self._queue.run(offer, request.claim))
        except BaseException:
            leave()
            raise

    async def _open(
        self, request: GenerationRequest, leave: Callable[[], None], refused_by: set[str]
    ) -> ReplicaStream:
        """Return the stream that a replica has accepted; it calls `leave` when it has begun.

        A call that has only waited for a replica to wake is made again if that ends: it waits like
        those that come while no replica runs, for however long that takes.

        Args:
            request: The client's.
            leave: Says that the request waits no more.
            refused_by: See `until_taken`.

        Raises:
            RaystreamError: See `_open_once`.
        """
        for _ in range(MAX_LOST_ASLEEP):
            with suppress(LostAsleepError):
                return await self._open_once(request, leave, refused_by)
        return await self._open_once(request, leave, refused_by)

    async def _open_once(
        self, request: GenerationRequest, leave: Callable[[], None], refused_by: set[str]
    ) -> ReplicaStream:
        """Return the stream that the router's replica has accepted; for arguments, see `_open`.

        Raises:
            InvalidRequestError: The client has to fix the request.
            OverloadedError: The replica is full.
            ModelChangedError: The replica is of another version than the request needs.
            LostAfterStartError: The replica was lost after it had begun with the request.
            LostAsleepError: The replica ends, and the request waited for it to wake.
            RaystreamError: See `first_answer`.
        """
        span = None if self._spans is None else self._spans.of_text(request)
        box = self._channels.open()
        try:
            sent = replace(
                request,
                stream=box.key,
                elapsed_s=seconds_since_arrival(),
                claim=self._informed(request.claim),
                trace=None if span is None else span.context,
                refused_by=frozenset(refused_by),
            )
            call = self._generate.remote(sent)
            responses = cast("Responses[GenerationEvent]", call)
            first = await first_answer(responses, self._channels, self._running.has_left)
            assert isinstance(first, Accepted | Refused), f"got a {type(first).__name__}"
            self._remember(request, first)
            raise_refusal(first, refused_by)
        except BaseException as error:
            self._channels.close(box)
            end(span, error)
            raise
        assert isinstance(first, Accepted), "a refusal is raised"
        if span is not None:
            span.accepted(first.num_prompt_tokens, first.replica_id)
        stream = ReplicaStream(
            responses,
            first,
            box,
            self._channels,
            span,
            waits_no_more=leave,
            count=partial(self.shares.charge, request.claim),
            # The replica from which the first token came has counted the prompt.
            num_new_prompt_tokens=0 if request.generated_token_ids else first.num_prompt_tokens,
        )
        try:
            assert first.channel is not None, "a replica says where it listens"
            await self._channels.connect(box, first.channel)
        except BaseException as error:
            end(span, error)
            await stream.aclose()
            if isinstance(error, ReplicaUnavailableError):
                raise LostAfterStartError(*error.args) from error
            raise
        return stream

    def _remember(self, request: GenerationRequest, answer: Accepted | Refused) -> None:
        """Note for Serve's router where the prompt's keys and values will lie."""
        if isinstance(answer, Refused) and isinstance(answer.error, InvalidRequestError):
            return  # it says nothing about the replica
        prefixes = self._running.prefixes
        note = prefixes.note if isinstance(answer, Accepted) else prefixes.forget
        note(prefix_keys(request), answer.replica_id)

    async def _pool(self, request: PoolingRequest, refused_by: set[str]) -> Any:
        """Return the row of each text, in order; see `until_taken` for `refused_by`."""
        span = None if self._spans is None else self._spans.of_texts(request)
        with recorded(span):
            sent = replace(
                request,
                elapsed_s=seconds_since_arrival(),
                trace=None if span is None else span.context,
                claim=self._informed(request.claim),
                refused_by=frozenset(refused_by),
            )
            answer = await self._ask_for_rows(sent)
            raise_refusal(answer, refused_by)
            assert isinstance(answer, Pooled), f"got a {type(answer).__name__}"
            num_tokens = sum(each.num_tokens for each in answer.texts)
            self.shares.charge(request.claim, cost(num_tokens))
            if span is not None:
                span.accepted(num_tokens, answer.replica_id)
            return answer.texts

    async def _ask_for_rows(self, request: PoolingRequest) -> object:
        """Return the answer of a replica with a channel, or of any; or the one of a turn.

        Suspects wait for a turn of their own, and others if their model has none.
        """
        if not request.num_deaths:
            answer: object = await self._calls.send(request)
            if answer is None:
                answer = await self._ask("pool", request)
            if not isinstance(answer, Asleep):
                return answer
        return await self._ask_in_turn(request)

    async def _ask_in_turn(self, request: PoolingRequest) -> PoolingEvent:
        """Return what a replica answers in the request's turn.

        The call is made again if the turn ends too early, and as in `_open`.

        Raises:
            LostAfterStartError: The replica was lost after it had begun with the request.
            LostAsleepError: Too many were lost, one after the other, before they had.
            NotBegunError: The go-ahead did not reach too many, likewise.
            RaystreamError: See `first_answer`.
        """
        num_lost = 0
        while True:
            sent = replace(request, elapsed_s=seconds_since_arrival())
            call = self._pool_in_turn.remote(sent)
            responses = cast("Responses[PoolingEvent]", call)
            try:
                answer = await first_answer(responses, self._channels, self._running.has_left)
            except ReplicaUnavailableError as error:
                num_lost += 1
                if num_lost > MAX_LOST_ASLEEP or not _had_not_begun(error, request):
                    raise
                await asyncio.sleep(LOST_BACKOFF_S)
                continue
            await read_to_end(responses)
            if not isinstance(answer, Asleep):
                return answer

    def _informed(self, claim: Claim) -> Claim:
        """Return a claim that tells the replica what the tenant got, and since when it waits."""
        return replace(
            claim,
            num_served=self.shares.served(claim),
            ingress=self._channels.channel_id,
            backlog=self._backlogs.numbers.get(claim.tenant, 0),
        )


def _had_not_begun(error: ReplicaUnavailableError, request: PoolingRequest) -> bool:
    """Return whether a call of `pool_in_turn` was lost before its go-ahead, and is no suspect's.

    Suspects look for another replica as `Retries` says.
    """
    if request.num_deaths:
        return isinstance(error, LostAsleepError)
    is_death = type(error) is ReplicaUnavailableError and isinstance(error.__cause__, LOST)
    return is_death or isinstance(error, LostAsleepError | NotBegunError)
