"""Which prefix of one sequence's tokens another one's keys and values can give.

Keys and values depend only on the tokens up to their own position, so token ids identify a prefix.
A layer with a window keeps only the newest tokens, so a sequence that has outgrown the window gives
its whole length or nothing.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeAlias

from deployments.engine.scheduling.sequence import Sequence

MIN_REUSED_TOKENS = 16
"""Shorter prefixes are not worth a copy or a wait: unrelated prompts share the first words of a
chat template, and prefilling so few tokens costs next to nothing."""


@dataclass(slots=True, eq=False)
class Retained:
    """Keys and values without a running sequence.

    Attributes:
        token_ids: Their tokens.
        last_used: When they were left or a prefix was last taken from them, on the table's clock,
            which counts these events.
        is_common: Whether it was kept for others: several sequences have begun with it, or the
            next turn of a conversation will.
        proof: The sequence that computed them and has not yet led to logits; None once it has.
    """

    token_ids: list[int]
    last_used: int = 0
    is_common: bool = False
    proof: Sequence | None = None


Holder: TypeAlias = Sequence | Retained


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix of a sequence that another one holds."""

    holder: Holder
    num_tokens: int


@dataclass(slots=True)
class Match:
    """What there is for a new sequence.

    Attributes:
        prefix: The longest prefix; None if there is none.
        num_lost_tokens: Tokens of the longest prefix that was once computed but has left its
            layers with windows; 0 if there is none, or none longer than `prefix`.
    """

    prefix: Prefix | None = None
    num_lost_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the prefix."""
        return self.prefix.num_tokens if self.prefix else 0


@dataclass(frozen=True, slots=True)
class PrefixRules:
    """What can be shared in a model.

    Attributes:
        full_context_length: Longest sequence that all layers keep in full. Of a longer one, layers
            with a window keep only the window.
    """

    full_context_length: int

    def keep_context(self, num_wanted: int, num_held: int) -> bool:
        """Return whether a holder of num_held tokens has all that token num_wanted needs to see.

        A ring that has wrapped holds the window of its newest token. That is enough to compute the
        next token, or the newest one again, but no earlier one.
        """
        return num_held <= self.full_context_length or num_wanted >= num_held - 1

    def longest(self, wanted: list[int], holders: Iterable[Holder]) -> Match:
        """Return the longest prefix of these tokens that a holder can give.

        The prefix leaves at least one token to compute, since only computed tokens yield logits.
        """
        best, longest = Match(), MIN_REUSED_TOKENS - 1
        for holder in holders:
            token_ids, num_held = holder.token_ids, num_stored_tokens(holder)
            end = min(len(wanted) - 1, num_held)
            # Comparing the one token that a longer match needs avoids most full comparisons.
            if end <= longest or token_ids[longest] != wanted[longest]:
                continue
            shared = num_shared_tokens(token_ids, wanted, end)
            if shared <= longest:
                continue
            if self.keep_context(shared, num_held):
                best.prefix, longest = Prefix(holder, shared), shared
            else:
                best.num_lost_tokens = max(best.num_lost_tokens, shared)
        if best.num_lost_tokens <= best.num_tokens:
            best.num_lost_tokens = 0
        return best

    def will_share(self, other: Sequence, wanted: list[int], num_tokens: int) -> bool:
        """Return whether another sequence, once prefilled, can give at least num_tokens."""
        num_held = len(other.token_ids)
        if not self.keep_context(num_tokens, num_held):
            num_tokens = num_held - 1
        if num_tokens > min(len(wanted) - 1, num_held):
            return False
        return other.token_ids[:num_tokens] == wanted[:num_tokens]

    def cover(self, token_ids: list[int], others: list[int]) -> bool:
        """Return whether tokens give every prefix that others give."""
        num_others = len(others)
        return (
            len(token_ids) >= num_others
            and self.keep_context(num_others, len(token_ids))
            # Most differ here, which saves the copy of a slice.
            and token_ids[num_others - 1] == others[-1]
            and token_ids[:num_others] == others
        )

    def is_worth_keeping(self, donor: Retained, num_tokens: int, num_planned_tokens: int) -> bool:
        """Return whether a donor has more to give than a sequence that takes it over would have.

        Args:
            donor: The donor.
            num_tokens: The tokens of its prefix that the sequence takes.
            num_planned_tokens: The tokens that the sequence may reach.
        """
        if len(donor.token_ids) - num_tokens >= MIN_REUSED_TOKENS:
            return True
        return donor.is_common and not self.keep_context(num_tokens, num_planned_tokens)


def num_stored_tokens(holder: Holder) -> int:
    """Return how many tokens have their keys and values in a holder's extents."""
    return len(holder.token_ids) if isinstance(holder, Retained) else holder.num_computed_tokens


def num_shared_tokens(first: Items[int], second: Items[int], limit: int) -> int:
    """Return the length of the common prefix of two lists, at most `limit`.

    Both lists have at least `limit` tokens. Compares slices, which runs at C speed, and halves the
    differing part, so each token is compared about twice.
    """
    same, differing = 0, limit + 1
    probe = limit
    while same < probe:
        if first[same:probe] == second[same:probe]:
            same = probe
        else:
            differing = probe
        probe = (same + differing) // 2
    return same
