"""TextGenerator: a model on our own engine, as a Serve deployment."""

from deployments.replica.lean_imports import lean_imports

with lean_imports():
    from deployments.generator.async_engine import AsyncEngine
    from deployments.generator.placed_engine import PlacedEngine, place_engine
    from deployments.generator_replica import GeneratorReplica


class TextGenerator(GeneratorReplica):
    """Generates text with one model on the engine of `deployments.engine`."""

    _engine: AsyncEngine

    def _open_engine(self) -> AsyncEngine:
        return AsyncEngine(self._place, self._observe)

    def _place(self) -> PlacedEngine:
        """Make the engine; runs on the engine's thread."""
        return place_engine(self._spec, self._device, self._phases.end, self._progress)
