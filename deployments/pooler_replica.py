"""PoolerReplica: a model's worker behind one method, whatever computes the texts.

Requests come through the channels of their ingresses, or as Serve's calls. Short ones are tokenized
at once, on the event loop; others gather while the tokenizer is busy (`@serve.batch`) and are
tokenized together on a thread. The worker (`deployments.pooling.pooling_worker`) takes them from a
queue. A cancelled request leaves it, and its unfinished results are dropped.

Models of a light group (`deployments.turns`) answer only in their turn. What comes at another time,
or has not begun when the turn ends, is answered with `Asleep` at once. Its ingress asks again with
a call of Serve's (`pool_in_turn`), which waits: such a call tells how it has lost its replica.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from ray import serve

from deployments.autoscaling import ReplicaLoad
from deployments.compute.work_watch import is_hung
from deployments.contract.descriptions import PoolerDescription
from deployments.contract.errors import REFUSALS, RaystreamError, ReplicaUnavailableError
from deployments.contract.gen_ai_spans import ModelSpan, end, recorded
from deployments.contract.generation import Refused, Started, Waking
from deployments.contract.model_spec import NO_POOLER_TURNS_ON_GPU
from deployments.contract.pooling import (
    Asleep,
    CallAddress,
    Pooled,
    PooledText,
    PoolingAnswer,
    PoolingEvent,
    PoolingInput,
    PoolingRequest,
    TextPair,
)
from deployments.contract.telemetry.metric_table import POOLER
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.contract.user_config import queue_limits, set_batching
from deployments.plan.replica_report import MAX_REPORTED_TENANTS, SleepState, Waits, WorkCounts
from deployments.pooler_description import describe_model
from deployments.pooling.pooling_worker import BatchStats, PoolerFacts, PoolingWorker
from deployments.pooling.request_queue import Job, QueueLimits, RequestQueue, TurnOverError
from deployments.pooling.text_encoder import EncodedTexts, TextEncoder
from deployments.replica.light_sleep import Use
from deployments.replica.metrics import PoolerMetrics
from deployments.replica.model_replica import ModelReplica
from deployments.replica.own_scaling import is_scaled_by_calls
from deployments.replica.probation import Probation

MAX_BATCH_SIZE = 32
BATCH_WAIT_TIMEOUT_S = 0.0
"""Zero, because requests collect in the queue while the device is busy."""

MAX_BRIEF_CHARACTERS = 2048
MAX_BRIEF_TEXTS = 16
"""Up to both, tokenizing takes about a millisecond at most, for which the event loop stands still.
"""


@dataclass(frozen=True, slots=True)
class _Call:
    """A request on its way through the replica.

    Attributes:
        request: The request.
        job: Its place in the queue.
        use: Its use of the model.
        span: Its span; None if its trace is not recorded.
        began_s: When it came, by a monotonic clock.
    """

    request: PoolingRequest
    job: Job
    use: Use
    span: ModelSpan | None
    began_s: float


class PoolerReplica(ModelReplica):
    """Answers texts with one model: scores of labels, or vectors.

    A subclass opens the worker that computes them.
    """

    _table = POOLER
    _facts: PoolerFacts
    _metrics: PoolerMetrics

    def _open_worker(self) -> PoolingWorker:
        """Return the worker of `_queue`, not started; its micro-batches go to `_hand_over`."""
        raise NotImplementedError

    def _start_worker(self) -> PoolerFacts:
        """Start the worker, and wait until it can compute.

        Raises:
            UnsupportedModelError: The model can't be served; one line says why.
            DeviceMemoryError: The share of the device is too small.
        """
        raise NotImplementedError

    def _start(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_encoding = 0  # batches that wait for the encoder's thread, or are on it
        self._gathers_all = False
        self._num_batches_seen = 0
        if self._spec.turn_group is not None and self._device.torch_device.type != "cpu":
            raise UnsupportedModelError(f"{self._spec.id} {NO_POOLER_TURNS_ON_GPU}")
        turn = self._own_turn()
        self._takes_turns = turn is not None
        self._queue = RequestQueue(
            QueueLimits(0, None),  # nothing arrives before the start
            priority_aging_s=self._spec.priority_aging_s,
        )
        self._worker = self._open_worker()
        facts = self._facts = self._start_worker()
        self._queue.set_limits(QueueLimits(*self._queue_limits({})))
        self._encoder = TextEncoder(
            facts.tokenizer, facts.max_model_len, facts.vocab_size, reads_types=facts.reads_types
        )
        self._metrics = PoolerMetrics(self._store, self._spec.id)
        self._sleeper = self._open_sleeper(
            self._worker, turn, self._queue.give_back, partial(self._queue.give_back, begun=True)
        )
        self._suspects = asyncio.Lock()
        self._channels.take_calls(self.pool)
        self._description = replace(
            describe_model(self._spec, facts.model, facts.max_model_len), footprint=self._footprint
        )

    async def describe(self) -> PoolerDescription:
        """Return the description of this replica's model."""
        return self._description

    def _apply(self, given: Mapping[str, float]) -> None:
        self._queue.set_limits(QueueLimits(*self._queue_limits(given)))
        set_batching(self._encode, given, MAX_BATCH_SIZE, BATCH_WAIT_TIMEOUT_S)
        self._gathers_all = given.get("batch_wait_timeout_s", BATCH_WAIT_TIMEOUT_S) > 0

    def _queue_limits(self, given: Mapping[str, float]) -> tuple[int, int | None]:
        return queue_limits(given, self._spec.entry, self._facts.memory.max_model_len)

    async def _check_health(self) -> None:
        self._sleeper.watch()  # nobody may have used the model since its start
        self._deep_sleep.look(self._sleeper)
        self._sleeper.wake_if_kept()
        self._require_alive()
        is_idle = self._worker.num_batches == self._num_batches_seen
        if is_idle and await is_hung(self._worker, self.ping):
            raise ReplicaUnavailableError("A micro-batch hangs.")
        self._num_batches_seen = self._worker.num_batches

    @property
    def _is_dead(self) -> bool:
        return not self._worker.is_alive

    @property
    def _load(self) -> ReplicaLoad:
        running = self._queue.num_running_tokens / self._facts.memory.max_batched_tokens
        return ReplicaLoad(
            running=min(1.0, running),
            waiting=self._waiting_for_turn,
            refused=min(1.0, self._queue.refused),
            recent=self._was_used,
            waiting_tokens=self._queue.num_waiting_tokens,
            awake=float(self._sleeper.is_ready),
        )

    @property
    def _waiting_for_turn(self) -> float:
        """The requests that wait for the model's turn, as a part of those that may be here.

        What waits for the device is in `waiting_tokens`: it takes all of it at once.
        """
        if not self._is_between_turns:
            return 0.0
        return min(1.0, self._queue.num_waiting / (self._queue.limits.max_queued_requests + 1))

    @property
    def _is_between_turns(self) -> bool:
        """Whether the model takes turns, and has none now, or has not woken in it."""
        return self._takes_turns and not self._sleeper.is_ready

    @property
    def _work(self) -> WorkCounts:
        return WorkCounts(
            self._queue.num_running,
            self._queue.num_waiting,
            waits=self._waits,
            tenants=self._queue.of_tenants(MAX_REPORTED_TENANTS),
        )

    @property
    def _waits(self) -> Waits:
        return self._queue.waits

    def _require_alive(self) -> None:
        if not self._worker.is_alive:
            why = "The model's worker has ended."
            raise ReplicaUnavailableError(why) from self._worker.failure

    async def ping(self) -> None:
        """Wait until the device has run a micro-batch; an idle device gets a short text.

        A model that sleeps lightly, or changes, sleeps on.

        Raises:
            RaystreamError: The worker is broken.
        """
        if self._sleeper.state is SleepState.AWAKE:
            await asyncio.wrap_future(self._worker.ping())
        else:
            self._require_alive()

    async def pool(self, request: PoolingRequest) -> PoolingAnswer:
        """Return the model's result for each text, or `Refused`; a model that sleeps wakes first.

        One that takes turns answers `Asleep` instead, also if its turn ends too early.

        Raises:
            RaystreamError: The request has failed, and not by its client's fault.
        """
        self._note_use()
        if self._is_between_turns:
            return Asleep(self._replica_id)
        try:
            with self._entered(request) as call:
                await self._sleeper.awake(call.use)
                return await self._answer(call)
        except REFUSALS as error:
            return Refused(error, self._replica_id)

    async def call_address(self) -> CallAddress:
        """Return where ingresses may send `PoolingRequest`s instead of calling `pool`."""
        channel = None if is_scaled_by_calls() else await self._channels.address()
        return CallAddress(self._replica_id, channel)

    async def pool_in_turn(self, request: PoolingRequest) -> AsyncIterator[list[PoolingEvent]]:
        """Stream, each in a list, the answer of `pool`, and `Started` before it.

        It is for suspects, which wait for theirs, and for requests that wait for the turn of their
        model: `Waking` comes from time to time meanwhile. The answer is missing if the ingress
        gives no go-ahead.

        Raises:
            RaystreamError: See `pool`.
        """
        self._note_use()
        try:
            with self._sleeper.in_use() as use, ExitStack() as held:
                waits = self._is_between_turns
                call = held.enter_context(self._entered(request)) if waits else None
                # A suspect could else be blamed for a death while it waits.
                async for waited_s in self._sleeper.waking(use):
                    if call is not None:
                        call.job.require_room()
                    yield [Waking(self._spec.id, waited_s, self._replica_id)]
                use.is_inside = False  # the turn does not wait for go-aheads
                if request.num_deaths:  # those that wait for each other leave the room to others
                    held.close()
                    call = None
                async with Probation(self._suspects, request.num_deaths):
                    self._require_alive()
                    with self._channels.go_aheads.expect() as go_ahead:
                        yield [Started(await self._channels.address(), go_ahead.number)]
                        if not await go_ahead.is_given():
                            return
                    call = call or held.enter_context(self._entered(request))
                    answer: PoolingAnswer = await self._answer(call)
        except REFUSALS as error:
            answer = Refused(error, self._replica_id)
        yield [answer]

    @contextmanager
    def _entered(self, request: PoolingRequest) -> Iterator[_Call]:
        """Hold room for a request, and record it, from its arrival to its end.

        Raises:
            OverloadedError: Too many wait.
            ReplicaUnavailableError: The model's worker has ended.
        """
        began_s = time.monotonic()
        self._loop = asyncio.get_running_loop()
        with recorded(None if self._spans is None else self._spans.of_texts(request)) as span:
            try:
                with self._queue.entered(request.claim) as job, self._sleeper.in_use() as use:
                    yield _Call(request, job, use, span, began_s)
            except REFUSALS as error:
                end(span, error)
                raise

    async def _answer(self, call: _Call) -> Pooled | Asleep:
        """Return the answer of a model that is awake; `Asleep` if its turn ends before.

        Raises:
            RaystreamError: The request is refused, or has failed.
        """
        request, job = call.request, call.job
        try:
            pooled = await self._pool(call)
        except TurnOverError:
            return Asleep(self._replica_id)
        if call.span is not None and job.taken_s is not None:
            call.span.accepted(job.num_tokens)
            call.span.waited(job.taken_s - call.began_s)
        duration_s = time.monotonic() - call.began_s + request.elapsed_s
        self._metrics.observe_finish(duration_s=duration_s)
        return pooled

    async def _pool(self, call: _Call) -> Pooled:
        """Encode a request's texts, and return their rows.

        Raises:
            TurnOverError: The model's turn was over before all were computed.
            RaystreamError: The request is refused, or has failed.
        """
        request, job = call.request, call.job
        # Two threads in the tokenizer would change each other's truncation.
        if self._num_encoding or self._gathers_all or not is_brief(request):
            encoded = await self._encode(request)
        else:
            (encoded,) = self._encoder.encode([request])
        if isinstance(encoded, RaystreamError):
            raise encoded
        if self._is_between_turns:
            raise TurnOverError
        call.use.is_inside = True
        self._queue.put(job, encoded.token_ids, encoded.type_ids)
        self._metrics.count_prompt(job.num_tokens)
        rows = await asyncio.wrap_future(job.answer)
        parts = zip(rows, encoded.token_ids, encoded.are_truncated, strict=True)
        texts = (
            PooledText(row, len(token_ids), is_truncated) for row, token_ids, is_truncated in parts
        )
        return Pooled(tuple(texts), self._replica_id)

    @serve.batch(
        max_batch_size=MAX_BATCH_SIZE,
        batch_wait_timeout_s=BATCH_WAIT_TIMEOUT_S,
        max_concurrent_batches=16,
    )
    async def _encode(self, requests: list[PoolingRequest]) -> list[EncodedTexts | RaystreamError]:
        """Encode requests that arrived together, off the event loop."""
        return await self._encode_on_thread(requests)

    async def _encode_on_thread(
        self, requests: Sequence[PoolingRequest]
    ) -> list[EncodedTexts | RaystreamError]:
        self._num_encoding += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._encoding, self._encoder.encode, requests)
        finally:
            self._num_encoding -= 1

    def _hand_over(self, stats: BatchStats) -> None:
        """Have the event loop record a micro-batch; runs on the worker's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._observe, stats)

    def _observe(self, stats: BatchStats) -> None:
        self._metrics.observe_batch(num_sequences=stats.num_sequences, num_tokens=stats.num_tokens)
        self._metrics.observe_waits(self._waits)
        self._metrics.observe_queue(
            num_running=self._queue.num_running, num_waiting=self._queue.num_waiting
        )

    def _stop(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.stop()


def is_brief(request: PoolingRequest) -> bool:
    """Return whether tokenizing a request takes about a millisecond at most.

    On the way to another thread and back it would wait twice for a core and for Python's lock.
    """
    is_few = len(request.texts) <= MAX_BRIEF_TEXTS
    return is_few and sum(map(_num_characters, request.texts)) <= MAX_BRIEF_CHARACTERS


def _num_characters(text: PoolingInput) -> int:
    """Return the length of a text; a token id counts as one character."""
    return len(text.first) + len(text.second) if isinstance(text, TextPair) else len(text)
