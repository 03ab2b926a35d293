"""The recipe of pydoc-chat: kinds, number and order of steps, and their learning rates."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class StepKind(StrEnum):
    """What a training step learns from."""

    TOWER = "tower"
    IMAGE = "image"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, except the corpus.

    The vision tower is trained first, by the probe; then the whole model is trained.

    Attributes:
        seed: Seed of every generator.
        tower_steps: Steps that train only the vision tower.
        tower_batch: Drawings in a tower step; an image step adds half as many for the probe.
        joint_steps: Steps of the whole model, on text and on images.
        text_batch: Conversations in a text step.
        image_batch: Conversations in an image step.
        image_every: Interval of image steps among the joint steps.
        warmup_steps: Steps over which learning rates rise.
        matrix_rate: Peak learning rate of both transformers' inner matrices (Muon).
        rate: Peak learning rate of all other parameters (AdamW).
        refused_share: Share of the text turns that ask about a made-up name.
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
        """Number of all steps: the tower's, then the joint ones."""
        return self.tower_steps + self.joint_steps

    def kind(self, step: int) -> StepKind:
        """Return the kind of a step."""
        if step < self.tower_steps:
            return StepKind.TOWER
        is_image_step = (step - self.tower_steps) % self.image_every == 0
        return StepKind.IMAGE if is_image_step else StepKind.TEXT

    def rate_share(self, step: int, *, is_tower: bool) -> float:
        """Return a step's fraction of the peak learning rate: warm-up, then a cosine to zero.

        The tower's schedule covers all steps, the text model's the joint ones.
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
"""A full course; then, from its saved weights, a short one with more made-up names."""
