"""The interface of replayed decode steps; `cpu_replay` and `cuda_replay` implement it."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from deployments.engine.attention.packed_step import PackedStep

Attend = Callable[..., torch.Tensor]
"""A step's attention as a traced graph calls it: queries, keys, values, index of the call."""


class DecodeReplay(Protocol):
    """Runs steps of decode rows by replaying a captured step of their size."""

    @property
    def num_captured(self) -> int:
        """The number of captured steps that are kept now."""
        ...

    def prepare(self, least: int, most: int) -> None:
        """Capture in advance what first steps of `least` to `most` rows would wait for."""
        ...

    def run(self, token_ids: Sequence[int], step: PackedStep) -> torch.Tensor | None:
        """Run a step of decode rows.

        Args:
            token_ids: Each row's token.
            step: The extents and position of each row; it has no chunks.

        Returns:
            [n, vocab], float32, on the model's device, a copy that later steps do not change; None
            if the step has to run plainly.
        """
        ...

    def drop(self) -> None:
        """Drop all captured steps, to free their memory; they are captured again on demand."""
        ...
