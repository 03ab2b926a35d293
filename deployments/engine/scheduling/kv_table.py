"""Tracks which extents each sequence holds and which prefixes new sequences can reuse.

Owns the occupancy of the KV memory. It decides, and returns the copies that follow: no tensors.

A running sequence holds one extent in each group of layers, long enough for all tokens that it may
reach, or, if that is unknown, for those that it has; then it grows later. The extents of a sequence
that has ended well go to `prefix_cache`, which evicts them when their blocks are needed. A new
sequence that shares a prefix with a running or a retained one takes over the keys and values of
that prefix instead of computing them.

Token ids don't identify images: a sequence with images neither donates nor reuses. No mask hides a
NaN, so a token that yields one spoils everything prefilled together with it. Therefore only
sequences past their prefill donate: their logits, which depend on all that they hold, were finite.
A sequence whose latest pass failed does not donate, since it may have written more than was
counted.

If a new sequence misses a prefix only because it has left a window (see `prefixes`), it computes
the prefix, and a copy as of the prefix's end is retained for the next.
"""

import logging
from collections.abc import Iterator
from operator import add, sub

from deployments.engine.scheduling.kv_extents import KVExtents
from deployments.engine.scheduling.prefix_cache import PrefixCache, fits
from deployments.engine.scheduling.prefixes import (
    MIN_REUSED_TOKENS,
    Holder,
    Match,
    Prefix,
    PrefixRules,
    Retained,
    num_stored_tokens,
)
from deployments.engine.scheduling.sequence import Sequence, SequenceState
from deployments.plan.kv_layout import KVCopy, KVLayout

logger = logging.getLogger(__name__)


class KVTable:
    """The running sequences and the retained prefixes, with the extents of both."""

    def __init__(
        self, layout: KVLayout, *, max_num_seqs: int, full_context_length: int, prefix_caching: bool
    ) -> None:
        """Start with every block free.

        Args:
            layout: The blocks of each group.
            max_num_seqs: The most sequences that run.
            full_context_length: See `PrefixRules`.
            prefix_caching: Whether prefixes are kept and shared.
        """
        self.layout = layout
        self.running: list[Sequence] = []
        self.extents = KVExtents[Holder](layout)
        self._max_num_seqs = max_num_seqs
        self._room: dict[Sequence, float] = {}  # tokens that a running one's extents take
        self._rules = PrefixRules(full_context_length)
        self._cache = PrefixCache(self.extents, self._rules)
        self._prefix_caching = prefix_caching

    @property
    def has_place(self) -> bool:
        """Whether another sequence may run, if there is memory for it."""
        return len(self.running) < self._max_num_seqs

    @property
    def usage(self) -> float:
        """The part of the blocks that running sequences hold, 0 to 1, in the fullest group."""
        return max(
            sum(pool[sequence].num_blocks for sequence in self.running) / pool.num_blocks
            for pool in self.extents.pools
        )

    @property
    def retained(self) -> tuple[Retained, ...]:
        """The retained prefixes."""
        return self._cache.retained

    def drop_retained(self) -> None:
        """Drop all retained prefixes."""
        self._cache.clear()

    def needs_room(self, sequence: Sequence) -> bool:
        """Return whether a running sequence has more tokens than its extents take."""
        return len(sequence.token_ids) > self._room[sequence]

    def find_prefix(self, sequence: Sequence) -> Match:
        """Return the longest prefix that can be given to a sequence now."""
        if not self._may_reuse(sequence):
            return Match()
        return self._rules.longest(sequence.token_ids, self._donors())

    def _may_reuse(self, sequence: Sequence) -> bool:
        """Return whether a prefix may be given to a sequence.

        The log-probabilities of a prompt come from the rows that a prefix would save.
        """
        return self._prefix_caching and sequence.can_chunk_prefill and not sequence.is_scoring

    def _donors(self) -> Iterator[Holder]:
        yield from self._cache.donors()
        for other in self.running:
            is_past_prefill = other.state is SequenceState.DECODING
            if is_past_prefill and other.can_chunk_prefill and not other.has_uncounted_kv:
                yield other

    def is_prefix_pending(self, sequence: Sequence, num_found: int) -> bool:
        """Return whether a sequence in prefill will soon offer a longer prefix than was found.

        Prefilling sequences go first in every step, so the wait costs about one step. It always
        ends: the first of them makes progress in every step, or leaves.

        A sequence that computes log-probabilities of its prompt takes many steps, in which the
        whole queue would wait. Nothing waits for it, not even the other answers to its prompt: the
        first of those computes the prompt once more, in few steps, for all of them.
        """
        if not self._may_reuse(sequence):
            return False
        worth_waiting = num_found + MIN_REUSED_TOKENS
        return any(
            self._rules.will_share(other, sequence.token_ids, worth_waiting)
            for other in self.running
            if other.state is SequenceState.PREFILLING
            and other.can_chunk_prefill
            and not other.is_scoring
        )

    def admit(self, sequence: Sequence, prefix: Prefix | None) -> list[KVCopy] | None:
        """Give a sequence its extents, with the prefix from `find_prefix`.

        Returns:
            The copies that make room and bring the prefix; None if there is no room, and then
            nothing has changed.
        """
        copies = self._give(sequence, prefix)
        if copies is not None:
            self.running.append(sequence)
            self._room[sequence] = self.extents.num_tokens_in(sequence)
        return copies

    def _give(self, sequence: Sequence, prefix: Prefix | None) -> list[KVCopy] | None:
        """Give a sequence extents beside those of its donor, or else the donor's."""
        num_tokens = sequence.num_planned_tokens
        if prefix is None:
            return self._take(sequence, num_tokens, None)
        donor, num_shared, copies = prefix.holder, prefix.num_tokens, None
        if isinstance(donor, Sequence) or self._rules.is_worth_keeping(
            donor, num_shared, num_tokens
        ):
            copies = self._take(sequence, num_tokens, donor)
        if copies is not None:
            self._cache.touch(donor)
            return copies + self._copy(donor, sequence, num_shared)
        if isinstance(donor, Sequence):
            return None
        return self._take_over(sequence, num_tokens, donor, num_shared)

    def grow(self, sequence: Sequence) -> list[KVCopy] | None:
        """Lengthen a running sequence's extents for its newest token.

        Returns:
            The copies that make room; None if there is no room, and then nothing has changed.
        """
        copies = self._extend(sequence, len(sequence.token_ids))
        if copies is not None:
            self._room[sequence] = self.extents.num_tokens_in(sequence)
        return copies

    def remove(self, sequence: Sequence, num_reusable_tokens: int) -> None:
        """Take a running sequence's extents back, and retain them if they can be of use.

        Args:
            sequence: The sequence.
            num_reusable_tokens: Its computed tokens, if its extents hold exactly these and they
                have led to finite logits; else 0.
        """
        self.running.remove(sequence)
        del self._room[sequence]
        self._cache.settle(sequence, is_proven=num_reusable_tokens > 0)
        is_useful = sequence.can_chunk_prefill and num_reusable_tokens >= MIN_REUSED_TOKENS
        if self._prefix_caching and is_useful:
            self._cache.retain(sequence, sequence.token_ids[:num_reusable_tokens])
        else:
            self.extents.give_back(sequence)

    def end_to_keep(self, sequence: Sequence) -> int:
        """Return after how many tokens to retain a copy for the turn that follows; 0 for none.

        What a grammar has allowed is mostly divided into other tokens when it comes back as text
        in the next turn. So that turn shares the prompt, and little of the answer; a sequence that
        outgrows its windows would give it neither.
        """
        end = sequence.num_prompt_tokens - 1
        if sequence.matcher is None or not self._may_reuse(sequence):
            return 0
        is_kept = self._rules.keep_context(end, sequence.max_num_tokens)
        is_held = end - sequence.num_computed_tokens < MIN_REUSED_TOKENS
        return 0 if is_kept or is_held else end

    def keep_prefix(self, sequence: Sequence) -> list[KVCopy]:
        """Retain a copy of what a sequence in prefill has computed so far.

        Returns:
            The copies; none if there is no room, which the log tells.
        """
        token_ids = sequence.token_ids[: sequence.num_computed_tokens]
        kept = self._cache.begin_common(sequence, token_ids)
        copies = self._take(kept, len(token_ids), None)
        if copies is None:
            logger.info("a shared prefix of %d tokens can't be kept: no room", len(token_ids))
            return []
        self._cache.add(kept)
        return copies + self._copy(sequence, kept, len(token_ids))

    def _take(self, holder: Holder, num_tokens: int, donor: Holder | None) -> list[KVCopy] | None:
        """Give a new holder extents for `num_tokens` tokens; never those of the donor."""
        wanted = self.layout.blocks_for(num_tokens)
        return self.extents.take(holder, wanted) if self._cache.evict_for(wanted, donor) else None

    def _take_over(
        self, sequence: Sequence, num_tokens: int, donor: Retained, num_kept: int
    ) -> list[KVCopy] | None:
        """Give a new sequence the extents of a donor, of which it keeps the first tokens."""
        own, others = self.extents.num_blocks_of(donor), self._cache.num_available(donor)
        if not fits(self.layout.blocks_for(num_tokens), tuple(map(add, own, others))):
            return None
        self._cache.pass_on(donor, sequence, num_kept)
        return self._extend(sequence, num_tokens)

    def _extend(self, sequence: Sequence, num_tokens: int) -> list[KVCopy] | None:
        """Lengthen a sequence's extents for `num_tokens` tokens, where they are shorter."""
        wanted = self.layout.blocks_for(num_tokens)
        more = map(sub, wanted, self.extents.num_blocks_of(sequence))
        is_free = self._cache.evict_for(tuple(max(0, number) for number in more), None)
        return self.extents.extend(sequence, wanted) if is_free else None

    def _copy(self, donor: Holder, target: Holder, num_tokens: int) -> list[KVCopy]:
        return self.extents.copy(donor, target, num_tokens, num_stored_tokens(donor))
