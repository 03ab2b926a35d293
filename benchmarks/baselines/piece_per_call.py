"""One call of the model for each piece, in the event loop: the simplest design.

The model never sees two texts together, and while it runs no other request is read.
"""

from collections.abc import Sequence
from typing import Generic

from benchmarks.baselines.pipeline_function import PipelineFunction, Result


class PiecePerCall(Generic[Result]):
    """Classifies a request's pieces one after the other."""

    def __init__(self, pipeline: PipelineFunction[Result]) -> None:
        self._pipeline = pipeline

    async def classify(self, pieces: Sequence[str]) -> list[Result]:
        """Return a result for each piece."""
        return [self._pipeline([piece])[0] for piece in pieces]
