"""Tracks which extents each sequence holds and which prefixes new sequences can reuse.

Owns the occupancy of the KV memory. It decides, and returns the copies that follow: no tensors.

A running sequence holds one extent in each group of layers, long enough for all tokens that it may
reach, or, if that is unknown, for those that it has; then it grows later. The extents of a sequence
that has ended well are retained, cut to its tokens, until their blocks are needed: the least
recently used leave first. A new sequence that shares a prefix with a running or a retained one
takes over the keys and values of that prefix instead of computing them.

Keys and values depend only on the tokens up to their own position, so token ids identify a prefix.
They don't identify images: a sequence with images neither donates nor reuses. No mask hides a NaN,
so a token that yields one spoils everything prefilled together with it. Therefore only sequences
past their prefill donate: their logits, which depend on all that they hold, were finite. A
sequence whose latest pass failed does not donate, since it may have written more than was counted.

A layer with a window keeps only the newest tokens, so a sequence that has outgrown the window gives
its whole length or nothing. If only that keeps a new sequence from a prefix, the new one computes
it, and a copy as of the prefix's end is retained for the next.
"""

import logging
import math
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TypeAlias

from deployments.engine.kv_layout import KVCopy, KVLayout
from deployments.engine.scheduling.block_pool import BlockPool, Move
from deployments.engine.scheduling.sequence import Sequence, SequenceState

logger = logging.getLogger(__name__)

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
        is_common: Whether it was kept as a prefix that several sequences have begun with.
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
    """What the table can give a new sequence.

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


class KVTable:
    """The running sequences and the retained prefixes, with the extents of both."""

    def __init__(
        self, layout: KVLayout, *, max_num_seqs: int, full_context_length: int, retains: bool
    ) -> None:
        """Start with free memory.

        Args:
            layout: The blocks of each group.
            max_num_seqs: The most sequences that run.
            full_context_length: Longest sequence that all layers keep in full. Of a longer one,
                layers with a window keep only the window.
            retains: Whether prefixes are kept and shared.
        """
        self.layout = layout
        self.running: list[Sequence] = []
        self._retained: list[Retained] = []
        self._pools = tuple(BlockPool[Holder](number) for number in layout.num_blocks)
        self._max_num_seqs = max_num_seqs
        self._num_held_tokens: dict[Sequence, float] = {}
        self._full_context_length = full_context_length
        self._retains = retains
        self._clock = 0

    @property
    def has_place(self) -> bool:
        """Whether another sequence may run, if there is memory for it."""
        return len(self.running) < self._max_num_seqs

    @property
    def usage(self) -> float:
        """The part of the blocks that running sequences hold, 0 to 1, in the fullest group."""
        return max(
            sum(pool[sequence].num_blocks for sequence in self.running) / pool.num_blocks
            for pool in self._pools
        )

    @property
    def retained(self) -> tuple[Retained, ...]:
        """The retained prefixes."""
        return tuple(self._retained)

    @property
    def pools(self) -> tuple[BlockPool[Holder], ...]:
        """The blocks of each group, and who holds them."""
        return self._pools

    def starts_of(self, holder: Holder) -> tuple[int, ...]:
        """Return the first token of a holder's extent in each group."""
        return tuple(pool[holder].first * self.layout.block_size for pool in self._pools)

    def needs_room(self, sequence: Sequence) -> bool:
        """Return whether a running sequence has more tokens than its extents hold."""
        return len(sequence.token_ids) > self._num_held_tokens[sequence]

    # Prefixes

    def find_prefix(self, sequence: Sequence) -> Match:
        """Return the longest prefix that can be given to a sequence now.

        The prefix leaves at least one token to compute, since only computed tokens yield logits.
        """
        best = Match()
        if not self._retains or not sequence.can_chunk_prefill:
            return best
        wanted, longest = sequence.token_ids, MIN_REUSED_TOKENS - 1
        limit = len(wanted) - 1
        for holder, token_ids, num_tokens in self._donors():
            end = min(limit, num_tokens)
            # Comparing the one token that a longer match needs avoids most full comparisons.
            if end <= longest or token_ids[longest] != wanted[longest]:
                continue
            shared = num_shared_tokens(token_ids, wanted, end)
            if shared <= longest:
                continue
            if self._keeps_context(shared, num_tokens):
                best.prefix, longest = Prefix(holder, shared), shared
            else:
                best.num_lost_tokens = max(best.num_lost_tokens, shared)
        if best.num_lost_tokens <= best.num_tokens:
            best.num_lost_tokens = 0
        return best

    def _donors(self) -> Iterator[tuple[Holder, list[int], int]]:
        """Yield each donor, its token ids, and how many of those tokens it holds."""
        for retained in self._retained:
            if retained.proof is None or retained.proof.state is SequenceState.DECODING:
                yield retained, retained.token_ids, len(retained.token_ids)
        for other in self.running:
            is_past_prefill = other.state is SequenceState.DECODING
            if is_past_prefill and other.can_chunk_prefill and not other.has_uncounted_kv:
                yield other, other.token_ids, other.num_computed_tokens

    def _keeps_context(self, num_wanted: int, num_held: int) -> bool:
        """Return whether a holder of num_held tokens has all that token num_wanted needs to see.

        A ring that has wrapped holds the window of its newest token. That is enough to compute the
        next token, or the newest one again, but no earlier one.
        """
        limit = self._full_context_length
        return num_held <= limit or num_wanted >= num_held - 1

    def is_prefix_pending(self, sequence: Sequence, num_found: int) -> bool:
        """Return whether a sequence in prefill will soon offer a longer prefix than was found.

        Prefilling sequences go first in every step, so the wait costs about one step. It always
        ends: the first of them makes progress in every step, or leaves.
        """
        if not self._retains or not sequence.can_chunk_prefill:
            return False
        worth_waiting = num_found + MIN_REUSED_TOKENS
        return any(
            self._will_share(other, sequence.token_ids, worth_waiting)
            for other in self.running
            if other.state is SequenceState.PREFILLING and other.can_chunk_prefill
        )

    def _will_share(self, other: Sequence, wanted: list[int], num_tokens: int) -> bool:
        """Return whether another sequence, once prefilled, can give at least num_tokens."""
        num_held = len(other.token_ids)
        if not self._keeps_context(num_tokens, num_held):
            num_tokens = num_held - 1
        if num_tokens > min(len(wanted) - 1, num_held):
            return False
        return other.token_ids[:num_tokens] == wanted[:num_tokens]

    # Extents

    def admit(self, sequence: Sequence, prefix: Prefix | None) -> list[KVCopy] | None:
        """Give a sequence its extents, with the prefix from `find_prefix`.

        Returns:
            The copies that make room and bring the prefix; None if there is no room, and then
            nothing has changed.
        """
        num_tokens = sequence.num_planned_tokens
        donor = prefix.holder if prefix else None
        copies = None
        if not isinstance(donor, Retained) or self._is_worth_keeping(donor, sequence, prefix):
            copies = self._take(sequence, num_tokens, donor)
            if copies is not None and prefix is not None:
                self._touch(prefix.holder)
                copies += self._copies_of(prefix, sequence)
        if copies is None and isinstance(donor, Retained) and prefix is not None:
            copies = self._take_over(sequence, num_tokens, donor, prefix.num_tokens)
        if copies is not None:
            self.running.append(sequence)
            self._num_held_tokens[sequence] = self._num_tokens_in(sequence)
        return copies

    def grow(self, sequence: Sequence) -> list[KVCopy] | None:
        """Lengthen a running sequence's extents for its newest token.

        Returns:
            The copies that make room; None if there is no room, and then nothing has changed.
        """
        copies = self._extend(sequence, self.layout.blocks_for(len(sequence.token_ids)), None)
        if copies is not None:
            self._num_held_tokens[sequence] = self._num_tokens_in(sequence)
        return copies

    def remove(self, sequence: Sequence, num_reusable_tokens: int) -> None:
        """Take a running sequence's extents back, and retain them if they can be of use.

        Args:
            sequence: The sequence.
            num_reusable_tokens: Its computed tokens, if its extents hold exactly these and they
                have led to finite logits; else 0.
        """
        self.running.remove(sequence)
        del self._num_held_tokens[sequence]
        for kept in [each for each in self._retained if each.proof is sequence]:
            if num_reusable_tokens:
                kept.proof = None
            else:
                self._drop(kept)
        is_useful = sequence.can_chunk_prefill and num_reusable_tokens >= MIN_REUSED_TOKENS
        if self._retains and is_useful:
            self._retain(sequence, sequence.token_ids[:num_reusable_tokens])
        else:
            self._give_back(sequence)

    def keep_prefix(self, sequence: Sequence) -> list[KVCopy]:
        """Retain a copy of what a sequence in prefill has computed so far.

        Returns:
            The copies; none if there is no room, which the log tells.
        """
        token_ids = sequence.token_ids[: sequence.num_computed_tokens]
        kept = Retained(token_ids, self._tick(), is_common=True, proof=sequence)
        copies = self._take(kept, len(token_ids), None)
        if copies is None:
            logger.info("a shared prefix of %d tokens can't be kept: no room", len(token_ids))
            return []
        self._retained.append(kept)
        return copies + self._copies_of(Prefix(sequence, len(token_ids)), kept)

    def _retain(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Keep a sequence's extents, instead of those that hold nothing else than they do."""
        kept = Retained(token_ids, self._tick())
        for other in list(self._retained):
            if self._covers(other.token_ids, token_ids) and other.proof is None:
                other.last_used = kept.last_used
                self._give_back(sequence)
                return
            if self._covers(token_ids, other.token_ids):
                self._drop(other)
        for pool, num_blocks in zip(
            self._pools, self.layout.blocks_for(len(token_ids)), strict=True
        ):
            pool.pass_on(sequence, kept)
            pool.cut(kept, num_blocks)
        self._retained.append(kept)

    def _covers(self, token_ids: list[int], others: list[int]) -> bool:
        """Return whether tokens give every prefix that others give."""
        num_others = len(others)
        return (
            len(token_ids) >= num_others
            and self._keeps_context(num_others, len(token_ids))
            and token_ids[:num_others] == others
        )

    def _is_worth_keeping(self, donor: Retained, sequence: Sequence, prefix: Prefix | None) -> bool:
        """Return whether a donor has more to give than a sequence that takes it over would have."""
        assert prefix is not None
        if len(donor.token_ids) - prefix.num_tokens >= MIN_REUSED_TOKENS:
            return True
        will_be_lost = not self._keeps_context(prefix.num_tokens, sequence.num_planned_tokens)
        return donor.is_common and will_be_lost

    def _take(self, holder: Holder, num_tokens: int, donor: Holder | None) -> list[KVCopy] | None:
        """Give a new holder extents for so many tokens; never those of the donor."""
        wanted = self.layout.blocks_for(num_tokens)
        if not self._make_free(wanted, donor):
            return None
        copies: list[KVCopy] = []
        for group, (pool, num_blocks) in enumerate(zip(self._pools, wanted, strict=True)):
            moves = pool.take(holder, num_blocks)
            assert moves is not None
            copies += self._copies(group, moves)
        return copies

    def _take_over(
        self, sequence: Sequence, num_tokens: int, donor: Retained, num_kept: int
    ) -> list[KVCopy] | None:
        """Give a new sequence the extents of a donor, of which it keeps the first tokens."""
        wanted = self.layout.blocks_for(num_tokens)
        if not self._can_extend(donor, wanted):
            return None
        self._retained.remove(donor)
        for pool, num_blocks in zip(
            self._pools, self.layout.blocks_for(max(num_kept, 1)), strict=True
        ):
            pool.pass_on(donor, sequence)
            if num_blocks < pool[sequence].num_blocks:
                pool.cut(sequence, num_blocks)
        copies = self._extend(sequence, wanted, sequence)
        assert copies is not None
        return copies

    def _can_extend(self, holder: Holder, wanted: tuple[int, ...]) -> bool:
        """Return whether a holder's extents could have so many blocks."""
        return all(
            num_blocks <= free + pool[holder].num_blocks
            for pool, num_blocks, free in zip(
                self._pools, wanted, self._num_available(holder), strict=True
            )
        )

    def _extend(
        self, holder: Holder, wanted: tuple[int, ...], donor: Holder | None
    ) -> list[KVCopy] | None:
        """Lengthen a holder's extents to so many blocks, where they have fewer."""
        more = tuple(
            max(0, num_blocks - pool[holder].num_blocks)
            for pool, num_blocks in zip(self._pools, wanted, strict=True)
        )
        if not self._make_free(more, donor):
            return None
        copies: list[KVCopy] = []
        for group, (pool, num_more) in enumerate(zip(self._pools, more, strict=True)):
            if num_more:
                moves = pool.extend(holder, pool[holder].num_blocks + num_more)
                assert moves is not None
                copies += self._copies(group, moves)
        return copies

    def _make_free(self, wanted: tuple[int, ...], donor: Holder | None) -> bool:
        """Drop the least recently used prefixes until so many blocks are free in each group.

        Returns:
            Whether they are; if they can't be, nothing is dropped.
        """
        if any(
            num_blocks > free
            for num_blocks, free in zip(wanted, self._num_available(donor), strict=True)
        ):
            return False
        by_age = iter(sorted(self._retained, key=_last_used))
        while any(
            num_blocks > pool.num_free for pool, num_blocks in zip(self._pools, wanted, strict=True)
        ):
            oldest = next(by_age)
            if oldest is not donor:
                self._drop(oldest)
        return True

    def _num_available(self, donor: Holder | None) -> tuple[int, ...]:
        """Return the blocks of each group that are free or retained, without the donor's."""
        return tuple(
            pool.num_free + sum(pool[r].num_blocks for r in self._retained if r is not donor)
            for pool in self._pools
        )

    def _drop(self, retained: Retained) -> None:
        self._retained.remove(retained)
        self._give_back(retained)

    def _give_back(self, holder: Holder) -> None:
        for pool in self._pools:
            pool.give_back(holder)

    def _num_tokens_in(self, sequence: Sequence) -> float:
        """Return the tokens that a sequence's extents hold; a full ring holds any number."""
        size = self.layout.block_size
        held = [
            pool[sequence].num_blocks * size
            for pool, capacity in zip(self._pools, self.layout.capacities, strict=True)
            if pool[sequence].num_blocks * size < capacity
        ]
        return min(held, default=math.inf)

    def _copies(self, group: int, moves: list[Move]) -> list[KVCopy]:
        size = self.layout.block_size
        return [
            KVCopy(group, move.source * size, move.target * size, move.num_blocks * size)
            for move in moves
        ]

    def _copies_of(self, prefix: Prefix, target: Holder) -> list[KVCopy]:
        """Return the copies of a prefix; a ring that has wrapped is copied as a whole."""
        num_held = num_stored_tokens(prefix.holder)
        starts = zip(self.starts_of(prefix.holder), self.starts_of(target), strict=True)
        return [
            KVCopy(group, source, to, capacity if num_held > capacity else prefix.num_tokens)
            for group, ((source, to), capacity) in enumerate(
                zip(starts, self.layout.capacities, strict=True)
            )
        ]

    def _touch(self, holder: Holder) -> None:
        if isinstance(holder, Retained):
            holder.last_used = self._tick()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def num_stored_tokens(holder: Holder) -> int:
    """Return how many tokens have their keys and values in a holder's extents."""
    return len(holder.token_ids) if isinstance(holder, Retained) else holder.num_computed_tokens


def _last_used(retained: Retained) -> int:
    return retained.last_used


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
