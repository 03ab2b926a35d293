"""VllmPooler: a model that classifies or embeds on vLLM, as a Serve deployment.

Like `deployments.vllm_generator` it runs in vLLM's environment, and is also imported where there is
no vLLM.
"""

from typing import TYPE_CHECKING

from deployments.pooler_replica import PoolerReplica
from deployments.pooling.pooling_worker import PoolerFacts, PoolingWorker
from deployments.vllm_engine.pooling_worker import VllmWorker
from deployments.vllm_engine.replica import VllmReplica

if TYPE_CHECKING:
    from deployments.vllm_engine.pooled_engine import VllmPooling


class VllmPooler(VllmReplica, PoolerReplica):
    """Answers texts with one model on vLLM."""

    def _open_worker(self) -> PoolingWorker:
        self._logs = self._open_logs()
        self._vllm_worker = VllmWorker(self._open_engine, self._queue, self._hand_over)
        return self._vllm_worker

    def _open_engine(self) -> "VllmPooling":
        """Start vLLM; runs on the worker's thread."""
        # Only the other environment has vLLM, which configures its logs when it is imported.
        from deployments.vllm_engine.pooled_engine import open_pooling

        self._phases.end("vLLM's imports")
        self._pooling = open_pooling(self._spec, self._logs, self._progress, on_cpu=self._on_cpu)
        return self._pooling

    def _start_worker(self) -> PoolerFacts:
        self._vllm_worker.start().result()
        self._phases.end("engine")
        return self._pooling.facts

    def _stop(self) -> None:
        super()._stop()
        if hasattr(self, "_logs"):
            self._logs.close()
