"""KV memory without tensors that keeps the token at each place."""

from collections.abc import Iterable

from deployments.engine.scheduling.prefixes import MIN_REUSED_TOKENS
from deployments.plan.kv_layout import KVCopy, KVLayout

Starts = tuple[int, ...]


class NaiveKV:
    """The contents of all groups, token by token.

    Image tokens are written as strings, since their placeholder ids don't identify the image.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.capacities = layout.capacities
        self.groups: list[list[object]] = [
            [None] * (number * layout.block_size) for number in layout.num_blocks
        ]

    def apply(self, copies: Iterable[KVCopy]) -> None:
        for copy in copies:
            tokens, n = self.groups[copy.group], copy.num_tokens
            assert max(copy.source, copy.target) + n <= len(tokens)
            tokens[copy.target : copy.target + n] = tokens[copy.source : copy.source + n]

    def write(self, starts: Starts, position: int, token: object) -> None:
        for tokens, start, capacity in zip(self.groups, starts, self.capacities, strict=True):
            tokens[start + position % capacity] = (position, token)

    def gives(self, starts: Starts, token_ids: list[int]) -> bool:
        """Return whether an extent holds the whole context of the token after these."""
        num_tokens = len(token_ids)
        return all(
            tokens[start + p % capacity] == (p, token_ids[p])
            for tokens, start, capacity in zip(self.groups, starts, self.capacities, strict=True)
            for p in range(max(0, num_tokens - capacity + 1), num_tokens)
        )

    def longest_prefix(self, wanted: list[int], donors: Iterable[tuple[Starts, int]]) -> int:
        """Return the most tokens that a donor, given with the number of its tokens, can give."""
        return max(
            (
                n
                for starts, num_tokens in donors
                for n in range(MIN_REUSED_TOKENS, min(num_tokens, len(wanted) - 1) + 1)
                if self.gives(starts, wanted[:n])
            ),
            default=0,
        )
