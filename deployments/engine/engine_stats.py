"""What an engine tells of itself between two steps."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A look at the engine between two steps.

    Attributes:
        num_running: Sequences that hold a slot.
        num_waiting: Sequences without one.
        num_steps: Steps from which a sequence gained; one that failed for every sequence is none.
        num_prompt_tokens: Tokens of all prompts that were given a slot.
        num_cached_tokens: How many of those were taken over from other sequences.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
