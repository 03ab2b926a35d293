"""VllmGenerator: a model on vLLM, as a Serve deployment.

Its replicas run in an environment of vLLM's own, by `py_executable` of Ray's `runtime_env`. This
module is also imported where there is no vLLM: Serve names a class by its module.
"""

from typing import TYPE_CHECKING

from deployments.contract.model_spec import NO_VLLM_SLEEP_ON_CPU, number
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.generator_replica import GeneratorReplica
from deployments.vllm_engine.replica import VllmReplica

if TYPE_CHECKING:
    from deployments.vllm_engine.engine import VllmEngine


class VllmGenerator(VllmReplica, GeneratorReplica):
    """Generates text with one model on vLLM."""

    _engine: "VllmEngine"

    def _open_engine(self) -> "VllmEngine":
        if self._on_cpu and number(self._spec.entry.light_sleep_after_s) is not None:
            raise UnsupportedModelError(NO_VLLM_SLEEP_ON_CPU)
        logs = self._open_logs()
        # Only the other environment has vLLM, which configures its logs when it is imported.
        from deployments.vllm_engine.engine import VllmEngine

        self._phases.end("vLLM's imports")
        return VllmEngine(
            self._spec, logs, self._observe, self._phases.end, self._progress, on_cpu=self._on_cpu
        )
