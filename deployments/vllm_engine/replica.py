"""What both kinds of replica on vLLM are: a model in processes below the replica's own.

Needs no vLLM: Serve imports the classes also where there is none.
"""

from collections.abc import Callable

from deployments.contract.model_spec import ModelSpec
from deployments.contract.telemetry.memory_report import MemoryUse
from deployments.device.device import MemoryDevice
from deployments.device.process_tree import TreeMemory
from deployments.replica.assigned_device import open_watched_device
from deployments.replica.model_replica import ModelReplica
from deployments.replica.own_actor import end_own_actor, own_log_file
from deployments.vllm_engine.logs import EngineLogs


class VllmReplica(ModelReplica):
    """A replica whose device only its processes use; it comes first among a class's bases."""

    def __init__(
        self,
        spec: ModelSpec,
        open_device: Callable[[ModelSpec], MemoryDevice] = open_watched_device,
        end_process: Callable[[], None] = end_own_actor,
    ) -> None:
        """Start vLLM; see `ModelReplica`."""
        super().__init__(spec, open_device, end_process)

    @property
    def _on_cpu(self) -> bool:
        """Whether vLLM computes on the CPU."""
        return self._device.torch_device.type == "cpu"

    def _open_logs(self) -> EngineLogs:
        """Return where vLLM's processes log; called before vLLM is imported, which looks there."""
        logs = EngineLogs(own_log_file(self._replica_id))
        logs.prepare()
        return logs

    def _read_memory(self) -> Callable[[], MemoryUse]:
        return TreeMemory(self._device)
