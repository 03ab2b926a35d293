"""VllmPooler: a model that classifies or embeds on vLLM, as a Serve deployment.

Like `deployments.vllm_generator` it runs in vLLM's environment, and is also imported where there is
no vLLM.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from deployments.contract.model_spec import ModelSpec
from deployments.contract.telemetry.memory_report import MemoryUse
from deployments.device.device import MemoryDevice
from deployments.device.process_tree import TreeMemory
from deployments.pooler_replica import PoolerReplica
from deployments.pooling.pooling_worker import PoolerFacts, PoolingWorker
from deployments.replica.assigned_device import open_watched_device
from deployments.replica.own_actor import end_own_actor, own_log_file
from deployments.vllm_engine.logs import EngineLogs
from deployments.vllm_engine.pooling_worker import VllmWorker

if TYPE_CHECKING:
    from deployments.vllm_engine.pooled_engine import VllmPooling


class VllmPooler(PoolerReplica):
    """Answers texts with one model on vLLM."""

    def __init__(
        self,
        spec: ModelSpec,
        open_device: Callable[[ModelSpec], MemoryDevice] = open_watched_device,
        end_process: Callable[[], None] = end_own_actor,
    ) -> None:
        """Start vLLM; see `ModelReplica`."""
        super().__init__(spec, open_device, end_process)

    def _open_worker(self) -> PoolingWorker:
        self._logs = EngineLogs(own_log_file(self._replica_id))
        self._logs.prepare()
        self._vllm_worker = VllmWorker(self._open_engine, self._queue, self._hand_over)
        return self._vllm_worker

    def _open_engine(self) -> "VllmPooling":
        """Start vLLM; runs on the worker's thread."""
        # Only the other environment has vLLM, which configures its logs when it is imported.
        from deployments.vllm_engine.pooled_engine import open_pooling

        self._phases.end("vLLM's imports")
        on_cpu = self._device.torch_device.type == "cpu"
        self._pooling = open_pooling(self._spec, self._logs, self._progress, on_cpu=on_cpu)
        return self._pooling

    def _start_worker(self) -> PoolerFacts:
        self._vllm_worker.start().result()
        self._phases.end("engine")
        return self._pooling.facts

    def _read_memory(self) -> Callable[[], MemoryUse]:
        return TreeMemory(self._device)

    def _stop(self) -> None:
        super()._stop()
        if hasattr(self, "_logs"):
            self._logs.close()
