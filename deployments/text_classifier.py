"""TextClassifier: a device's worker behind one method, as a Serve deployment.

A replica is one process with one model on one device, or on a share of one. What arrives together
is tokenized together (`@serve.batch`) and handed to the worker (`deployments.classifier`), which
takes all that waits whenever the device is free. A request that is cancelled leaves the line; what
the device has begun of it is dropped.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

from ray import serve

from deployments.assigned_device import open_assigned_device
from deployments.classifier.device_worker import BatchStats, DeviceWorker
from deployments.classifier.sequence_classifier import SequenceClassifier
from deployments.classifier.text_encoder import EncodedTexts, TextEncoder
from deployments.classifier.waiting_line import Job, LineLimits, Probabilities, WaitingLine
from deployments.classifier_metrics import ClassifierMetrics
from deployments.contract import (
    Classification,
    ClassificationRequest,
    Classified,
    ClassifierDescription,
    Refused,
)
from deployments.errors import OverloadedError, RaystreamError, ReplicaUnavailableError
from deployments.gpu.device import MemoryDevice
from deployments.model_spec import ModelSpec
from deployments.placed_classifier import log_placement, place_classifier
from deployments.user_config import BATCH_KEYS, given_settings, queue_limits, set_batching

MAX_BATCH_SIZE = 32
BATCH_WAIT_TIMEOUT_S = 0.0
"""None: while the device is busy, requests gather by themselves."""

USER_CONFIG_KEYS = BATCH_KEYS


class TextClassifier:
    """Classifies texts with one model."""

    def __init__(
        self,
        spec: ModelSpec,
        open_device: Callable[[ModelSpec], MemoryDevice] = open_assigned_device,
    ) -> None:
        """Load the model and warm it up.

        Args:
            spec: The model.
            open_device: Finds the device.

        Raises:
            UnsupportedModelError: The model can't be served; one line says why.
            DeviceMemoryError: The share of the device is too small.
        """
        started = time.monotonic()
        self._spec = spec
        self._device = open_device(spec)
        self._line = WaitingLine(LineLimits(spec.max_queued_requests, spec.max_queued_tokens))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_batches_seen = 0
        self._worker = DeviceWorker(
            self._place, self._line, spec.max_batched_tokens, self._hand_over
        )
        self._worker.start().result()
        loaded = self._placed.loaded
        self._encoder = TextEncoder(loaded.tokenizer, loaded.max_model_len)
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._replica_id = uuid4().hex
        self._metrics = ClassifierMetrics()
        self._description = ClassifierDescription(
            id=spec.id,
            created=int(time.time()),
            max_model_len=loaded.max_model_len,
            labels=loaded.labels,
            is_multi_label=loaded.is_multi_label,
        )
        log_placement(self._placed, spec, self._device, time.monotonic() - started)

    def _place(self) -> SequenceClassifier:
        """Make the model; runs on the worker's thread."""
        self._placed = place_classifier(self._spec, self._device)
        return self._placed.classifier

    async def describe(self) -> ClassifierDescription:
        """Return what this replica serves."""
        return self._description

    def reconfigure(self, user_config: Mapping[str, float | None]) -> None:
        """Set how requests are coalesced, and how much may wait.

        Args:
            user_config: `max_batch_size`, the most requests that are tokenized in one call;
                `batch_wait_timeout_s`, how long the first of them waits for others; and
                `max_queued_requests` and `max_queued_tokens`, in place of the model entry's.
        """
        given = given_settings(user_config, USER_CONFIG_KEYS)
        self._line.set_limits(LineLimits(*queue_limits(given, self._spec)))
        set_batching(self._encode, given, MAX_BATCH_SIZE, BATCH_WAIT_TIMEOUT_S)

    async def check_health(self) -> None:
        """Raise unless the worker has run a micro-batch since the last call, or runs one now.

        Raises:
            ReplicaUnavailableError: The worker has ended; Serve replaces the replica.
        """
        if not self._worker.is_alive:
            raise ReplicaUnavailableError("The classifier's worker has ended.")
        if self._worker.num_batches == self._num_batches_seen:
            await self.ping()
        self._num_batches_seen = self._worker.num_batches

    async def ping(self) -> None:
        """Wait until the device has done a micro-batch; an idle one gets a token to run.

        Raises:
            RaystreamError: The worker is not well.
        """
        await asyncio.wrap_future(self._worker.ping())

    async def classify(self, request: ClassificationRequest) -> Classified | Refused:
        """Return what the model says of each text; a full replica gives `Refused`.

        Raises:
            RaystreamError: The request was refused or has failed (see `deployments.errors`).
        """
        arrived = time.monotonic()
        self._loop = asyncio.get_running_loop()
        try:
            with self._line.place() as job:
                classified = await self._classify(request, job)
        except OverloadedError as error:
            return Refused(error.message, error.retry_after_s or 1, self._replica_id)
        self._metrics.observe_finish(duration_s=time.monotonic() - arrived)
        return classified

    async def _classify(self, request: ClassificationRequest, job: Job) -> Classified:
        encoded = await self._encode(request)
        if isinstance(encoded, RaystreamError):
            raise encoded
        self._line.put(job, encoded.token_ids)
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
        """Encode what arrived together, off the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._encoding, self._encoder.encode, requests)

    def _hand_over(self, stats: BatchStats) -> None:
        """Have the event loop record a micro-batch; runs on the worker's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._observe, stats)

    def _observe(self, stats: BatchStats) -> None:
        self._metrics.observe_batch(stats)
        self._metrics.observe_line(
            num_running=self._line.num_running, num_waiting=self._line.num_waiting
        )

    def __del__(self) -> None:
        """End the threads when Serve lets the replica go."""
        # What `__init__` did not reach is not there.
        if hasattr(self, "_worker"):
            self._worker.stop()
        if hasattr(self, "_encoding"):
            self._encoding.shutdown(wait=False)


def _classifications(
    encoded: EncodedTexts, probabilities: list[Probabilities]
) -> tuple[Classification, ...]:
    parts = zip(probabilities, encoded.token_ids, encoded.are_truncated, strict=True)
    return tuple(
        Classification(probabilities, len(token_ids), is_truncated)
        for probabilities, token_ids, is_truncated in parts
    )
