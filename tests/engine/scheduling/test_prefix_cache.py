from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.kv_extents import KVExtents
from deployments.engine.scheduling.prefix_cache import PrefixCache
from deployments.engine.scheduling.prefixes import Holder, PrefixRules, Retained
from deployments.engine.scheduling.sequence import Sequence, SequenceEvent, SequenceRequest
from deployments.plan.kv_layout import KVLayout

BLOCK = 8


class Cached:
    """A cache of ten blocks, and sequences that leave prefixes there."""

    def __init__(self) -> None:
        self.extents = KVExtents[Holder](KVLayout((10 * BLOCK,), (10,), block_size=BLOCK))
        self.cache = PrefixCache(self.extents, PrefixRules(10 * BLOCK))

    def retain(self, token_ids: range) -> None:
        """Let a sequence end that has computed these tokens."""
        ended = sequence(token_ids)
        assert self.extents.take(ended, self.extents.layout.blocks_for(len(token_ids))) == []
        self.cache.retain(ended, list(token_ids))

    def begin(self, token_ids: range) -> Sequence:
        """Retain a common prefix that a sequence in prefill has computed, and return that one."""
        prefilling = sequence(range(10 * BLOCK))
        prefix = self.cache.begin_common(prefilling, list(token_ids))
        self.extents.take(prefix, self.extents.layout.blocks_for(len(token_ids)))
        self.cache.add(prefix)
        return prefilling

    @property
    def firsts(self) -> list[int]:
        """The first tokens of the retained prefixes, which name them here."""
        return [each.token_ids[0] for each in self.cache.retained]

    @property
    def num_free(self) -> int:
        (number,) = self.extents.num_free
        return number


def sequence(token_ids: range) -> Sequence:
    request = SequenceRequest("s", tuple(token_ids), SamplingParams(max_tokens=1))
    return Sequence(request, max_model_len=100, eos_token_ids=frozenset())


def three() -> Cached:
    """Return a cache with prefixes of three, two and one blocks, left in this order."""
    cached = Cached()
    for first, num_blocks in ((100, 3), (200, 2), (300, 1)):
        cached.retain(range(first, first + num_blocks * BLOCK))
    assert cached.num_free == 4
    return cached


def test_nothing_is_evicted_while_enough_is_free() -> None:
    cached = three()
    assert cached.cache.evict_for((4,), None)
    assert cached.firsts == [100, 200, 300]


def test_the_oldest_are_evicted_until_the_blocks_are_free_and_no_more() -> None:
    cached = three()
    assert cached.cache.evict_for((5,), None)
    assert (cached.firsts, cached.num_free) == ([200, 300], 7)
    assert cached.cache.evict_for((9,), None)
    assert (cached.firsts, cached.num_free) == ([300], 9)


def test_a_prefix_that_was_used_is_evicted_last() -> None:
    cached = three()
    cached.cache.touch(cached.cache.retained[0])
    assert cached.cache.evict_for((5,), None)
    assert cached.firsts == [100, 300]


def test_a_running_donor_is_touched_without_effect() -> None:
    cached = three()
    cached.cache.touch(sequence(range(5)))
    assert [each.last_used for each in cached.cache.retained] == [1, 2, 3]


def test_a_donor_s_blocks_are_neither_counted_nor_evicted() -> None:
    cached = three()
    donor = cached.cache.retained[0]
    assert cached.cache.num_available(None) == (10,)
    assert cached.cache.num_available(donor) == (7,)
    assert not cached.cache.evict_for((8,), donor)
    assert cached.firsts == [100, 200, 300]  # what can't be had takes nothing from others
    assert cached.cache.evict_for((7,), donor)
    assert cached.firsts == [100]


def test_a_longer_prefix_takes_the_place_of_those_that_it_holds() -> None:
    cached = Cached()
    cached.retain(range(100, 116))
    cached.retain(range(200, 216))
    cached.retain(range(100, 124))
    assert [len(each.token_ids) for each in cached.cache.retained] == [16, 24]
    assert cached.firsts == [200, 100]
    assert cached.num_free == 5


def test_a_prefix_that_is_held_already_only_makes_the_holder_newer() -> None:
    cached = Cached()
    cached.retain(range(100, 124))
    cached.retain(range(200, 216))
    cached.retain(range(100, 116))
    assert cached.firsts == [100, 200]
    assert cached.num_free == 5
    assert cached.cache.evict_for((7,), None)
    assert cached.firsts == [100]


def test_an_unproven_prefix_is_given_once_its_sequence_decodes_and_dropped_if_it_fails() -> None:
    cached = Cached()
    proving, failing = cached.begin(range(100, 124)), cached.begin(range(200, 216))
    assert list(cached.cache.donors()) == []
    for each in (proving, failing):
        each.admit(num_cached_tokens=0)
    proving.handle(SequenceEvent.PREFILLED)
    assert [each.token_ids[0] for each in cached.cache.donors()] == [100]
    cached.cache.settle(failing, is_proven=False)
    assert (cached.firsts, cached.num_free) == ([100], 7)
    cached.cache.settle(proving, is_proven=True)
    (kept,) = cached.cache.retained
    assert kept.proof is None
    assert kept.is_common


def test_an_unproven_prefix_does_not_stand_for_a_proven_one() -> None:
    cached = Cached()
    cached.begin(range(100, 124))
    cached.retain(range(100, 116))
    assert [len(each.token_ids) for each in cached.cache.retained] == [24, 16]
    assert [len(each.token_ids) for each in cached.cache.donors()] == [16]


def test_what_is_passed_on_is_cut_and_no_longer_retained() -> None:
    cached = three()
    prefix, heir = cached.cache.retained[0], sequence(range(100, 110))
    cached.cache.pass_on(prefix, heir, 9)
    assert cached.firsts == [200, 300]
    assert cached.extents.num_blocks_of(heir) == (2,)
    assert cached.num_free == 5
    assert isinstance(prefix, Retained)
