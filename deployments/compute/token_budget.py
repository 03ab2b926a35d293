"""How many tokens a step may run, less while memory is short.

The rule: a step that is out of memory halves the budget, from what that step tried to run; after
`GOOD_STEPS` steps without such a failure it doubles, up to what was configured. Each running
sequence needs one token of every step, so the budget bounds the running sequences as well.
"""

import logging

logger = logging.getLogger(__name__)

GOOD_STEPS = 64
"""So many steps per attempt to grow: where memory stays short, about one step in 64 is lost."""


class StepBudget:
    """The most tokens of a step.

    Attributes:
        max_tokens: What is configured.
        tokens: What a step may run now, from 1 to `max_tokens`.
    """

    __slots__ = ("_num_good_steps", "max_tokens", "tokens")

    def __init__(self, max_tokens: int) -> None:
        """Start with all that is configured."""
        self.max_tokens = max_tokens
        self.tokens = max_tokens
        self._num_good_steps = 0

    def shrink(self, num_tokens: int) -> None:
        """Halve the budget, since so many tokens at once were out of memory."""
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        self._num_good_steps = 0
        logger.warning(
            "out of memory with %d tokens in a step; at most %d from now on",
            num_tokens,
            self.tokens,
        )

    def note_good_step(self) -> None:
        """Count a step that had enough memory."""
        if self.tokens == self.max_tokens:
            return
        self._num_good_steps += 1
        if self._num_good_steps == GOOD_STEPS:
            self.tokens = min(2 * self.tokens, self.max_tokens)
            self._num_good_steps = 0
            logger.info("a step may run %d tokens again", self.tokens)
