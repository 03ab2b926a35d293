"""The recipe of pydoc-detector: how often it sees its pieces, how many at once, at which rate."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, but for the documents.

    Attributes:
        seed: Of every generator.
        epochs: How often all documents are cut, each time anew.
        batch: Pieces in a step.
        warmup_steps: Over which the learning rate rises.
        rate: Peak learning rate (AdamW).
        weight_decay: Of matrices.
        masked_share: Share of the tokens that a step hides, so that no single one is relied upon.
        shifted_share: Share of the pieces that stand at drawn positions and not at the first ones,
            so that all positions are learned.
    """

    seed: int = 40
    epochs: int = 5
    batch: int = 32
    warmup_steps: int = 60
    rate: float = 1e-3
    weight_decay: float = 0.05
    masked_share: float = 0.1
    shifted_share: float = 0.5

    def rate_share(self, step: int, num_steps: int) -> float:
        """Return the share of the peak learning rate: warm-up, then a cosine down to zero."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))
