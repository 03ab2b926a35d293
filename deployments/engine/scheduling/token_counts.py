"""The distinct tokens of a sequence and how often its output holds each; penalties need them.

The counts grow token by token and are never rebuilt while the sequence runs. They belong to the
sequence, not to a place or a step, so they stay valid when it moves or is recomputed.
"""

from array import array
from collections.abc import Iterable


class TokenCounts:
    """The distinct tokens of one sequence.

    Attributes:
        token_ids: Each token once, int64.
        output_counts: How often the output holds the token at the same index of `token_ids`,
            int64; 0 for a token that is only in the prompt.
        added: The index in `token_ids` of each token of the output, in order, int64. Who has seen
            the first n of them knows that only the rest have changed.
    """

    __slots__ = ("__weakref__", "_places", "added", "output_counts", "token_ids")

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        """Count the tokens so far; pass an empty prompt if no penalty looks at it."""
        self._places = {token_id: at for at, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self.token_ids = array("q", self._places)
        self.output_counts = array("q", bytes(8 * len(self._places)))
        self.added = array("q")
        for token_id in output_token_ids:
            self.add(token_id)

    def __len__(self) -> int:
        """Return the number of distinct tokens."""
        return len(self.token_ids)

    def add(self, token_id: int) -> None:
        """Count the next token of the output."""
        at = self._places.setdefault(token_id, len(self.token_ids))
        if at == len(self.token_ids):
            self.token_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[at] += 1
        self.added.append(at)
