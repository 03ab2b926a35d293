"""The prefix cache: keys and values that no running sequence holds, and their eviction.

The extents of a sequence that has ended well are retained, cut to its tokens, until their blocks
are needed. Then the least recently used are evicted first, and none if that would not make enough
room. `KVTable` decides what is retained and what it is given to.
"""

from collections.abc import Iterator
from operator import attrgetter

from deployments.engine.scheduling.kv_extents import Blocks, KVExtents
from deployments.engine.scheduling.prefixes import Holder, PrefixRules, Retained
from deployments.engine.scheduling.sequence import Sequence, SequenceState


class PrefixCache:
    """The retained prefixes, which hold extents as running sequences do."""

    def __init__(self, extents: KVExtents[Holder], rules: PrefixRules) -> None:
        """Start empty.

        Args:
            extents: Those of running sequences and retained prefixes.
            rules: What can be shared.
        """
        self._extents = extents
        self._rules = rules
        self._retained: list[Retained] = []
        self._clock = 0

    @property
    def retained(self) -> tuple[Retained, ...]:
        """The retained prefixes."""
        return tuple(self._retained)

    def donors(self) -> Iterator[Retained]:
        """Iterate over those that may be given to sequences: they have led to finite logits."""
        for retained in self._retained:
            if retained.proof is None or retained.proof.state is SequenceState.DECODING:
                yield retained

    def num_available(self, donor: Holder | None) -> Blocks:
        """Return the blocks that are free or retained, without the donor's."""
        retained = [each for each in self._retained if each is not donor]
        return tuple(
            pool.num_free + sum(pool[each].num_blocks for each in retained)
            for pool in self._extents.pools
        )

    def evict_for(self, wanted: Blocks, donor: Holder | None) -> bool:
        """Evict the least recently used prefixes until enough blocks are free.

        Args:
            wanted: The blocks.
            donor: Whose prefix is never evicted.

        Returns:
            Whether they are free; if they can't be, nothing is evicted.
        """
        if not fits(wanted, self.num_available(donor)):
            return False
        by_age = iter(sorted(self._retained, key=attrgetter("last_used")))
        while not fits(wanted, self._extents.num_free):
            oldest = next(by_age)
            if oldest is not donor:
                self._drop(oldest)
        return True

    def begin_common(self, sequence: Sequence, token_ids: list[int]) -> Retained:
        """Return a prefix that a sequence in prefill has computed; `add` retains it."""
        return Retained(token_ids, self._tick(), is_common=True, proof=sequence)

    def add(self, prefix: Retained) -> None:
        """Retain a prefix that has extents."""
        self._retained.append(prefix)

    def retain(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Keep a sequence's extents, instead of those that hold nothing else than they do."""
        kept = Retained(token_ids, self._tick())
        for other in list(self._retained):
            if self._rules.cover(other.token_ids, token_ids) and other.proof is None:
                other.last_used = kept.last_used
                self._extents.give_back(sequence)
                return
            if self._rules.cover(token_ids, other.token_ids):
                self._drop(other)
        self._extents.pass_on(sequence, kept, len(token_ids))
        self._retained.append(kept)

    def settle(self, sequence: Sequence, *, is_proven: bool) -> None:
        """Keep what a sequence that ends has computed for others if it is proven, else drop it."""
        for kept in [each for each in self._retained if each.proof is sequence]:
            if is_proven:
                kept.proof = None
            else:
                self._drop(kept)

    def pass_on(self, prefix: Retained, heir: Sequence, num_kept: int) -> None:
        """Give a prefix's extents to a sequence, cut to its first tokens."""
        self._retained.remove(prefix)
        self._extents.pass_on(prefix, heir, num_kept)

    def touch(self, donor: Holder) -> None:
        """Note that a prefix was taken from a donor."""
        if isinstance(donor, Retained):
            donor.last_used = self._tick()

    def clear(self) -> None:
        """Drop all retained prefixes."""
        for retained in self.retained:
            self._drop(retained)

    def _drop(self, retained: Retained) -> None:
        self._retained.remove(retained)
        self._extents.give_back(retained)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def fits(wanted: Blocks, free: Blocks) -> bool:
    """Return whether the blocks of each group suffice."""
    return all(number <= limit for number, limit in zip(wanted, free, strict=True))
