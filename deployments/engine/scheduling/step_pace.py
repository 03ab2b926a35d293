"""How many tokens of prompts a step computes beside running streams, so that these don't stall.

A step gives each running sequence one token, so its clients wait for the next one as long as the
step takes. Tokens of prompts in it make it longer: on a CPU, 512 of them can take a second where a
decode step takes 30 ms. The pace finds from the steps themselves how many tokens fit into the wait
that the configuration allows.

The estimate is a step's time beyond that of a decode step, by its tokens of prompts. Where steps
have prompts for long, the decode step's time is an old one, but the number of tokens still settles
where steps take as long as they may: whatever the decode step's share is taken for, a step that
takes just as long gets as many tokens again.
"""

from typing import Final

MIN_TOKENS: Final = 16
"""Tokens of prompts that a step may always have, so that prompts go on however slow steps are."""

FIRST_TOKENS: Final = 64
"""Tokens of the first step that has any, before there is an estimate."""

WEIGHT: Final = 0.25
"""What the newest step counts in an estimate: one that lost its core is forgotten soon."""

DECODE_STEPS: Final = 2.0
"""Decode steps that a step may take, even if that is longer than what the configuration allows:
otherwise prompts would hardly go on where decode steps alone take so long."""


class StepPace:
    """Bounds the tokens of prompts in a step that decodes too.

    Attributes:
        max_prompt_tokens: The bound of the next such step.
    """

    __slots__ = ("_decode_s", "_max_step_s", "_token_s", "max_prompt_tokens")

    def __init__(self, max_step_s: float) -> None:
        """Start without an estimate.

        Args:
            max_step_s: How long such a step may take, in seconds.
        """
        self._max_step_s = max_step_s
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self.max_prompt_tokens = FIRST_TOKENS

    def note(self, num_decode_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step.

        Args:
            num_decode_rows: Its decode rows.
            num_prompt_tokens: Its tokens of prompts.
            seconds: How long it took.
        """
        if not num_prompt_tokens:
            self._decode_s = _mean(self._decode_s, seconds)
            return
        decode_s = self._decode_s or 0.0
        beyond_s = max(0.0, seconds - decode_s) if num_decode_rows else seconds
        self._token_s = _mean(self._token_s, beyond_s / num_prompt_tokens)
        allowed_s = max(self._max_step_s, DECODE_STEPS * decode_s) - decode_s
        # Twice the last bound at most: few tokens say little of many.
        most = 2 * max(self.max_prompt_tokens, num_prompt_tokens)
        fitting = int(allowed_s / self._token_s) if self._token_s else most
        self.max_prompt_tokens = max(MIN_TOKENS, min(fitting, most))


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + WEIGHT * (newest - before)
