"""TextClassifier: a device's worker behind one method, as a Serve deployment.

Requests that arrive together are tokenized together (`@serve.batch`) and queued for the device's
worker (`deployments.classifier`), which takes everything in the queue whenever the device is free.
A cancelled request leaves the queue, and its unfinished results are dropped.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping

from ray import serve

from deployments.autoscaling import ReplicaLoad
from deployments.classifier.description import describe_model
from deployments.classifier.device_worker import BatchStats, DeviceWorker
from deployments.classifier.placed_classifier import PlacedClassifier, place_classifier
from deployments.classifier.request_queue import Job, Probabilities, QueueLimits, RequestQueue
from deployments.classifier.sequence_classifier import SequenceClassifier
from deployments.classifier.text_encoder import EncodedTexts, TextEncoder
from deployments.compute.work_watch import is_hung
from deployments.contract import (
    Classification,
    ClassificationEvent,
    ClassificationRequest,
    Classified,
    ClassifierDescription,
    Refused,
    Started,
)
from deployments.errors import OverloadedError, RaystreamError, ReplicaUnavailableError
from deployments.metrics import ClassifierMetrics
from deployments.model_replica import ModelReplica
from deployments.probation import Probation
from deployments.user_config import BATCH_KEYS, given_settings, queue_limits, set_batching

MAX_BATCH_SIZE = 32
BATCH_WAIT_TIMEOUT_S = 0.0
"""Zero, because requests collect in the queue while the device is busy."""


class TextClassifier(ModelReplica):
    """Classifies texts with one model."""

    def _start(self) -> PlacedClassifier:
        spec = self._spec
        self._queue = RequestQueue(QueueLimits(spec.max_queued_requests, spec.max_queued_tokens))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_batches_seen = 0
        self._worker = DeviceWorker(
            self._place, self._queue, spec.max_batched_tokens, self._hand_over
        )
        self._worker.start().result()
        loaded = self._placed.loaded
        self._encoder = TextEncoder(loaded.tokenizer, loaded.max_model_len)
        self._metrics = ClassifierMetrics()
        self._probation = Probation()
        self._description = describe_model(spec, loaded)
        return self._placed

    def _place(self) -> SequenceClassifier:
        """Make the model; runs on the worker's thread."""
        self._placed = place_classifier(self._spec, self._device, self._phases.end)
        return self._placed.classifier

    async def describe(self) -> ClassifierDescription:
        """Return the description of this replica's model."""
        return self._description

    def reconfigure(self, user_config: Mapping[str, float | None]) -> None:
        """Set how requests are batched, and how much may wait.

        Args:
            user_config: `max_batch_size`, the most requests that are tokenized in one call;
                `batch_wait_timeout_s`, how long the first of them waits for others; and
                `max_queued_requests` and `max_queued_tokens`, which replace the model entry's.
        """
        given = given_settings(user_config, BATCH_KEYS)
        self._queue.set_limits(QueueLimits(*queue_limits(given, self._spec)))
        set_batching(self._encode, given, MAX_BATCH_SIZE, BATCH_WAIT_TIMEOUT_S)

    async def _check_health(self) -> None:
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
        running = self._queue.num_running_tokens / self._spec.max_batched_tokens
        return ReplicaLoad(
            running=min(1.0, running),
            refused=min(1.0, self._queue.refused),
            recent=self._was_used,
            waiting_tokens=self._queue.num_waiting_tokens,
        )

    def _require_alive(self) -> None:
        if not self._worker.is_alive:
            why = "The classifier's worker has ended."
            raise ReplicaUnavailableError(why) from self._worker.failure

    async def ping(self) -> None:
        """Wait until the device has run a micro-batch; an idle device gets a short text.

        Raises:
            RaystreamError: The worker is broken.
        """
        await asyncio.wrap_future(self._worker.ping())

    async def classify(self, request: ClassificationRequest) -> Classified | Refused:
        """Return the model's result for each text; a full replica returns `Refused`.

        Raises:
            RaystreamError: The request was refused or has failed (see `deployments.errors`).
        """
        self._note_use()
        arrived = time.monotonic()
        self._loop = asyncio.get_running_loop()
        try:
            with self._queue.place() as job:
                classified = await self._classify(request, job)
        except OverloadedError as error:
            return Refused(error.message, error.retry_after_s or 1, self._replica_id)
        self._metrics.observe_finish(duration_s=time.monotonic() - arrived)
        return classified

    async def classify_suspect(
        self, request: ClassificationRequest
    ) -> AsyncIterator[list[ClassificationEvent]]:
        """Stream two lists: `Started` when this suspect's turn has come, then `classify`'s answer.

        The answer is missing if the ingress gives no go-ahead.

        Raises:
            RaystreamError: The request was refused or has failed (see `deployments.errors`).
        """
        async with self._probation.trial(request.num_deaths):
            self._require_alive()
            with self._channels.go_aheads.expect() as go_ahead:
                yield [Started(await self._channels.address(), go_ahead.number)]
                if not await go_ahead.is_given():
                    return
            answer = await self.classify(request)
        yield [answer]

    async def _classify(self, request: ClassificationRequest, job: Job) -> Classified:
        encoded = await self._encode(request)
        if isinstance(encoded, RaystreamError):
            raise encoded
        self._queue.put(job, encoded.token_ids)
        self._metrics.count_texts(job.num_tokens)
        probabilities = await asyncio.wrap_future(job.answer)
        return Classified(_classifications(encoded, probabilities), self._replica_id)

    @serve.batch(
        max_batch_size=MAX_BATCH_SIZE,
        batch_wait_timeout_s=BATCH_WAIT_TIMEOUT_S,
        max_concurrent_batches=16,
    )
    async def _encode(
        self, requests: list[ClassificationRequest]
    ) -> list[EncodedTexts | RaystreamError]:
        """Encode requests that arrived together, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, self._encoder.encode, requests)

    def _hand_over(self, stats: BatchStats) -> None:
        """Have the event loop record a micro-batch; runs on the worker's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._observe, stats)

    def _observe(self, stats: BatchStats) -> None:
        self._metrics.observe_batch(num_sequences=stats.num_sequences, num_tokens=stats.num_tokens)
        self._metrics.observe_queue(
            num_running=self._queue.num_running, num_waiting=self._queue.num_waiting
        )

    def _stop(self) -> None:
        if hasattr(self, "_worker"):
            self._worker.stop()


def _classifications(
    encoded: EncodedTexts, probabilities: list[Probabilities]
) -> tuple[Classification, ...]:
    parts = zip(probabilities, encoded.token_ids, encoded.are_truncated, strict=True)
    return tuple(
        Classification(probabilities, len(token_ids), is_truncated)
        for probabilities, token_ids, is_truncated in parts
    )
