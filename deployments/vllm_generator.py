"""VllmGenerator: a model on vLLM, as a Serve deployment.

Its replicas run in an environment of vLLM's own, by `py_executable` of Ray's `runtime_env`. This
module is also imported where there is no vLLM: Serve names a class by its module.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from deployments.contract.model_spec import ModelSpec
from deployments.contract.telemetry.memory_report import MemoryUse
from deployments.device.device import MemoryDevice
from deployments.device.process_tree import TreeMemory
from deployments.generator_replica import GeneratorReplica
from deployments.replica.assigned_device import open_watched_device
from deployments.replica.own_actor import end_own_actor, own_log_file
from deployments.vllm_engine.logs import EngineLogs

if TYPE_CHECKING:
    from deployments.vllm_engine.engine import VllmEngine


class VllmGenerator(GeneratorReplica):
    """Generates text with one model on vLLM."""

    _engine: "VllmEngine"

    def __init__(
        self,
        spec: ModelSpec,
        open_device: Callable[[ModelSpec], MemoryDevice] = open_watched_device,
        end_process: Callable[[], None] = end_own_actor,
    ) -> None:
        """Start vLLM; see `ModelReplica`."""
        super().__init__(spec, open_device, end_process)

    def _open_engine(self) -> "VllmEngine":
        logs = EngineLogs(own_log_file(self._replica_id))
        logs.prepare()
        # Only the other environment has vLLM, which configures its logs when it is imported.
        from deployments.vllm_engine.engine import VllmEngine

        self._phases.end("vLLM's imports")
        on_cpu = self._device.torch_device.type == "cpu"
        return VllmEngine(
            self._spec, logs, self._observe, self._phases.end, self._progress, on_cpu=on_cpu
        )

    def _read_memory(self) -> Callable[[], MemoryUse]:
        return TreeMemory(self._device)
