"""`@serve.batch` around the model: batches form as texts arrive, and then queue for the device.

It looks like a solution but is not: a batch is fixed before the device is free, so texts that
arrive during a slow call go into many small batches, which then run one after the other.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from ray import serve

from benchmarks.baselines.pipeline_function import PipelineFunction, Result


class BatchOnArrival(Generic[Result]):
    """The body of a Serve deployment that batches only by Serve's decorator."""

    def __init__(
        self, pipeline: PipelineFunction[Result], max_batch_size: int, timeout_s: float
    ) -> None:
        self._pipeline = pipeline
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
        # Not as a decorator: all instances would then share the class's one queue.
        batching = serve.batch(max_batch_size=max_batch_size, batch_wait_timeout_s=timeout_s)
        self._classify_batch = batching(self._run)

    async def classify(self, pieces: Sequence[str]) -> list[Result]:
        """Return a result for each piece."""
        return list(await asyncio.gather(*(self._classify_batch(piece) for piece in pieces)))

    async def _run(self, pieces: list[str]) -> list[Result]:
        loop = asyncio.get_running_loop()
        return list(await loop.run_in_executor(self._device, self._pipeline, pieces))
