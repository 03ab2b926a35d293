"""Which tokens a sequence holds, and how often its output holds each: what penalties look at.

Grows token by token and is never made anew from the whole sequence while that runs. It belongs to
the sequence, not to a slot or a step, so it stays true when that moves or is computed again.
"""

from array import array
from collections.abc import Iterable


class TokenHistory:
    """The distinct tokens of one sequence.

    Attributes:
        token_ids: Each token once, int64.
        output_counts: How often the output holds the token at the same place of `token_ids`,
            int64; 0 for one that stands in the prompt alone.
    """

    __slots__ = ("_places", "output_counts", "token_ids")

    def __init__(self, prompt_token_ids: Iterable[int], output_token_ids: Iterable[int]) -> None:
        """Take what the sequence holds so far; the prompt may be left out where it is of no use."""
        self._places = {token_id: at for at, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self.token_ids = array("q", self._places)
        self.output_counts = array("q", bytes(8 * len(self._places)))
        for token_id in output_token_ids:
            self.add(token_id)

    def __len__(self) -> int:
        """Return the number of distinct tokens."""
        return len(self.token_ids)

    def add(self, token_id: int) -> None:
        """Take the next token of the output."""
        at = self._places.setdefault(token_id, len(self.token_ids))
        if at == len(self.token_ids):
            self.token_ids.append(token_id)
            self.output_counts.append(0)
        self.output_counts[at] += 1
