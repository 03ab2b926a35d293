"""The recipe of pydoc-chat: how many steps of which kind, in which order, at which rates."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class StepKind(StrEnum):
    """What a step learns from."""

    TOWER = "tower"
    IMAGE = "image"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, but for the corpus.

    The vision tower learns first, alone, from the probe; then everything learns together.

    Attributes:
        seed: Of every generator.
        tower_steps: Steps of the vision tower alone.
        tower_batch: Drawings in such a step; an image step brings half as many for the probe.
        joint_steps: Steps of the whole model, for text and images in turn.
        text_batch: Conversations in a text step.
        image_batch: Conversations in an image step.
        image_every: Every so many joint steps, an image step.
        warmup_steps: Over which learning rates rise.
        matrix_rate: Peak learning rate of both transformers' inner matrices (Muon).
        rate: Peak learning rate of all else (AdamW).
        refused_share: Share of the text turns that ask for a made-up name.
    """

    seed: int = 20
    tower_steps: int = 900
    tower_batch: int = 96
    joint_steps: int = 1300
    text_batch: int = 48
    image_batch: int = 32
    image_every: int = 3
    warmup_steps: int = 50
    matrix_rate: float = 0.02
    rate: float = 1.5e-3
    refused_share: float = 0.38

    @property
    def num_steps(self) -> int:
        """All steps, in the order in which they are taken: the tower's, then the joint ones."""
        return self.tower_steps + self.joint_steps

    def kind(self, step: int) -> StepKind:
        """Tell what a step is about."""
        if step < self.tower_steps:
            return StepKind.TOWER
        is_image_step = (step - self.tower_steps) % self.image_every == 0
        return StepKind.IMAGE if is_image_step else StepKind.TEXT

    def rate_share(self, step: int, *, is_tower: bool) -> float:
        """Return the share of the peak learning rate: warm-up, then a cosine down to zero.

        The tower's runs over all steps, the text model's over the joint ones.
        """
        start = 0 if is_tower else self.tower_steps
        if step < start + self.warmup_steps:
            return max(0, step + 1 - start) / self.warmup_steps
        progress = (step - start - self.warmup_steps) / (self.num_steps - start - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))


STAGES: Final = (
    Recipe(),
    Recipe(
        seed=21,
        tower_steps=0,
        joint_steps=480,
        matrix_rate=0.01,
        rate=8e-4,
        refused_share=0.55,
    ),
)
"""First everything; then, from what that saved, a short course with more made-up names."""
