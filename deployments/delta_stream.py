"""The deltas of one sequence, between the engine's hand-over and the reader of the stream."""

import asyncio

from deployments.engine.output import TextDelta


class DeltaStream:
    """Collects deltas until the reader comes; it then gets all at once.

    Attributes:
        is_finished: Whether the reader has taken the last delta.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.is_finished = False
        self._deltas: list[TextDelta] = []
        self._is_ready = asyncio.Event()

    def put(self, delta: TextDelta) -> None:
        """Add a delta; called on the reader's event loop."""
        self._deltas.append(delta)
        self._is_ready.set()

    async def take(self) -> list[TextDelta]:
        """Wait for a delta; return all that are there."""
        await self._is_ready.wait()
        self._is_ready.clear()
        taken, self._deltas = self._deltas, []
        self.is_finished = taken[-1].finish_reason is not None
        return taken
