"""Limits the tokens of a step, and lowers the limit while memory is short.

When a step runs out of memory, the budget becomes half of what the step tried to run. After
`GOOD_STEPS` steps without such a failure it doubles, up to the configured limit. Each running
sequence needs one token of every step, so the budget bounds the number of running sequences too.
"""

import logging

logger = logging.getLogger(__name__)

GOOD_STEPS = 64
"""Steps between attempts to grow: if memory stays short, about one step in 64 fails."""


class TokenBudget:
    """The number of tokens that a step may run.

    Attributes:
        max_tokens: The configured limit.
        tokens: The current limit, from 1 to `max_tokens`.
    """

    __slots__ = ("_num_good_steps", "max_tokens", "tokens")

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.tokens = max_tokens
        self._num_good_steps = 0

    def shrink(self, num_tokens: int) -> None:
        """Halve the budget after a step of `num_tokens` ran out of memory."""
        self.tokens = max(1, min(self.tokens, num_tokens) // 2)
        self._num_good_steps = 0
        logger.warning(
            "out of memory with %d tokens in a step; at most %d from now on",
            num_tokens,
            self.tokens,
        )

    def note_good_step(self) -> None:
        """Count a step with enough memory; double the budget after `GOOD_STEPS` of them."""
        if self.tokens == self.max_tokens:
            return
        self._num_good_steps += 1
        if self._num_good_steps == GOOD_STEPS:
            self.tokens = min(2 * self.tokens, self.max_tokens)
            self._num_good_steps = 0
            logger.info("a step may run %d tokens again", self.tokens)
