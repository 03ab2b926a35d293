"""FleetGenerator: servers of vLLM that somebody else runs, as a Serve deployment.

It holds no model, and needs no GPU: see `deployments.vllm_engine.fleet`.
"""

from deployments.generator_replica import GeneratorReplica
from deployments.vllm_engine.fleet import FleetEngine


class FleetGenerator(GeneratorReplica):
    """Generates text with one model on servers of vLLM."""

    def _open_engine(self) -> FleetEngine:
        return FleetEngine(self._spec, self._observe)
