"""Sequences of a better priority take the places of others, in the estimate and in the engine."""

import pytest

from deployments.contract.errors import OverloadedError, OverloadReason
from deployments.contract.generation import RequestGroup
from deployments.plan.replica_report import NO_WAITS, WaitReason, Waits
from tests.generator.admission.fake_replica import Replica


def test_with_one_priority_all_go_into_the_engine_at_once_and_none_leaves_it() -> None:
    replica = Replica(max_num_seqs=2)
    for name in "abcdef":
        replica.add(name)
    assert (replica.running, replica.inside) == ("ab", "abcdef")
    replica.end("a")
    replica.add("r", is_resumed=True)
    assert (replica.running, replica.inside) == ("bc", "rbcdef")


def test_the_newest_of_the_lowest_priority_gives_up_its_place() -> None:
    replica = Replica(max_num_seqs=4)
    for name, priority in (("a", 2), ("b", 1), ("c", 2), ("d", 0)):
        replica.add(name, priority)
    replica.add("x", 0)
    assert (replica.running, replica.inside) == ("abdx", "abdxc")
    replica.add("y", 1)
    assert (replica.running, replica.inside) == ("bdxy", "bdxyac")
    replica.add("z", 1)
    assert replica.running == "bdxy", "it displaces none of its own priority"
    replica.end("d")
    assert replica.running == "bxyz"


def test_as_many_give_up_their_places_as_the_memory_needs_or_none() -> None:
    replica = Replica()
    for name, priority in (("a", 0), ("b", 1), ("c", 1), ("d", 1)):
        replica.add(name, priority, num_tokens=25)
    replica.add("x", 0, num_tokens=60)
    assert replica.running == "ax"
    replica.add("y", 0, num_tokens=90)
    assert replica.running == "ax", "two of its own priority hold too much"


def test_an_offered_sequence_that_comes_next_keeps_what_memory_comes_free() -> None:
    replica = Replica()
    for name in "abcde":
        replica.add(name, num_tokens=20)
    big = replica.add("B", num_tokens=80, is_resumed=True, is_parked=True)
    for name in "abcd":
        replica.add(name + name, num_tokens=20)
        replica.counted.park_late(replica.permits["B"])
        assert not big.is_parked
        replica.end(name)
    assert replica.running == "eB", "else small ones would have had it"


def test_an_offered_sequence_that_lacks_a_place_or_is_not_next_is_given_back() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a")
    only = replica.add("b", is_resumed=True, is_parked=True)
    replica.counted.park_late(replica.permits["b"])
    assert only.is_parked
    replica = Replica()
    replica.add("a", num_tokens=90)
    replica.add("b", num_tokens=20, is_resumed=True, is_parked=True)
    second = replica.add("c", num_tokens=20, is_resumed=True, is_parked=True)
    own = replica.add("d", num_tokens=20)
    for name in "cd":
        replica.counted.park_late(replica.permits[name])
    assert second.is_parked
    assert own.is_parked


def test_a_displaced_sequence_goes_on_before_new_ones_of_its_priority() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", 1)
    replica.add("b", 1)
    replica.add("x", 0)
    assert (replica.running, replica.inside) == ("x", "xab")
    replica.end("x")
    assert replica.running == "a"


def test_who_was_displaced_long_enough_is_not_displaced_again() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", 1)
    for number in range(3):
        replica.add("x", 0)
        assert replica.running == "x", number
        replica.now_s += 20
        replica.end("x")
        assert replica.running == "a"
    replica.add("y", 0)
    assert replica.running == "a", "it has waited for 60 s, as long as a step of priority takes"


def test_what_was_waited_elsewhere_counts() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", 1, waited_s=61)
    replica.add("x", 0)
    assert replica.running == "a"


def test_a_suspect_is_not_displaced() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", 1).may_yield = False
    replica.add("x", 0)
    assert replica.running == "a"


def test_few_are_ahead_in_the_engine_while_there_is_a_choice() -> None:
    replica = Replica(max_num_seqs=1, max_queued=20)
    for name in "abcdef":
        replica.add(name, 1)
    assert replica.inside == "abcdef"
    replica.add("x", 0)
    replica.add("y", 0)
    assert replica.inside == "xya"
    assert replica.counted.num_outside == 5
    replica.end("x")
    assert (replica.running, replica.inside) == ("y", "yab")
    replica.end("y")
    assert (replica.running, replica.inside) == ("a", "abcdef"), "no choice is left"


def test_what_the_engine_has_begun_with_stays_and_makes_room_for_another_ahead() -> None:
    replica = Replica(max_num_seqs=1, max_queued=20)
    for name in "abcd":
        replica.add(name, 1, tenant=name)
    assert replica.inside == "abc"
    replica.counted.note_begun(replica.permits["b"])
    assert replica.inside == "abcd"
    replica.add("x", 0)
    assert replica.inside == "bxac"


def test_a_full_queue_parks_its_newest_of_the_worst_priority_for_a_better_one() -> None:
    replica = Replica(max_num_seqs=1, max_queued=3)
    for name, priority in (("a", 0), ("b", 1), ("c", 2), ("d", 1)):
        replica.add(name, priority)
    with pytest.raises(OverloadedError):
        replica.add("e", 2)
    replica.add("x", 0)
    assert [name for name, run in replica.runs.items() if run.is_parked] == ["c"]
    assert replica.counted.num_waiting == 3


def test_nothing_is_parked_for_a_request_whose_tokens_find_no_room() -> None:
    replica = Replica(max_num_seqs=1, max_queued=1, max_queued_tokens=50)
    replica.add("a", 1, 40)
    replica.add("b", 1, 40)
    with pytest.raises(OverloadedError) as caught:
        replica.add("x", 0, 60)
    assert caught.value.reason is OverloadReason.TOKENS
    assert replica.parked == ""
    replica.add("y", 0, 50)
    assert replica.parked == "b", "its tokens make room, too"


@pytest.mark.parametrize("tenant", ["", "few"], ids=["priority", "share"])
def test_nothing_is_parked_before_a_request_is_known_to_be_valid(tenant: str) -> None:
    replica = Replica(max_num_seqs=1, max_queued=4)
    worse = 0 if tenant else 1
    for name in "abcde":
        replica.add(name, worse, tenant="many")
    replica.come("invalid", 0, tenant=tenant)
    replica.come("x", 0, tenant=tenant)
    assert replica.parked == ""
    replica.end("invalid")
    replica.accept("x")
    assert replica.parked == "e"
    assert replica.counted.num_waiting == 4


def test_no_more_come_than_can_be_parked_before_one_of_them_is_accepted() -> None:
    replica = Replica(max_num_seqs=1, max_queued=2)
    replica.add("-", 0)
    for name in "ab":
        replica.add(name, 1)
    for name in "xy":
        replica.come(name)
    with pytest.raises(OverloadedError):
        replica.come("z")
    for name in "yx":
        replica.accept(name)
    assert (replica.parked, replica.counted.num_waiting) == ("ab", 2)


def test_a_better_priority_exceeds_the_limit_only_by_what_is_going_to_be_parked() -> None:
    replica = Replica(max_num_seqs=2, max_queued=2)
    for name in "abcd":
        replica.add(name, 1).may_park = False
    with pytest.raises(OverloadedError):
        replica.add("x", 0)
    replica = Replica(max_num_seqs=2, max_queued=2)
    for name in "abcd":
        replica.add(name, 1).may_park = name not in "cd"
    for name in "xy":
        replica.add(name, 0)
    assert (replica.running, replica.parked) == ("xy", "b")
    assert replica.counted.num_waiting == 3, "a has just been displaced"
    with pytest.raises(OverloadedError):
        replica.add("z", 0)


def test_who_is_parked_ends_nothing() -> None:
    replica = Replica(max_num_seqs=1, max_queued=1)
    replica.add("long")
    for _ in range(100):
        replica.now_s += 1
        replica.add("p", 1, is_resumed=True)
        replica.counted.park(replica.permits["p"])
        replica.end("p")
    replica.add("w")
    with pytest.raises(OverloadedError) as caught:
        replica.add("x")
    untouched = Replica(max_num_seqs=1, max_queued=1)
    for name in ("long", "w"):
        untouched.add(name)
    untouched.now_s += 100
    with pytest.raises(OverloadedError) as expected:
        untouched.add("x")
    assert caught.value.retry_after_s == expected.value.retry_after_s


def test_a_full_replica_without_a_queue_admits_who_will_displace_another() -> None:
    replica = Replica(max_num_seqs=1, max_queued=0)
    replica.add("a", 1)
    replica.add("x", 0)
    assert replica.running == "x"
    with pytest.raises(OverloadedError):
        replica.add("y", 0)


def test_a_parked_sequence_frees_its_place_at_once() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("a", 1)
    replica.add("x", 0)
    replica.counted.park(replica.permits["a"])
    assert replica.counted.num_waiting == 0
    assert replica.inside == "x"


def test_a_group_of_a_better_priority_displaces_as_many() -> None:
    replica = Replica(max_num_seqs=3)
    for name in "abc":
        replica.add(name, 1)
    replica.add("x", 0, group=RequestGroup("g", 2, is_first=True))
    replica.add("y", 0, group=RequestGroup("g", 2, is_first=False))
    assert replica.running == "axy"


def test_why_and_how_long_sequences_wait_is_told() -> None:
    replica = Replica(max_num_seqs=2)
    assert replica.counted.waits is NO_WAITS
    for name in "abc":
        replica.add(name, 1)
    replica.now_s += 3
    assert replica.counted.waits == Waits({WaitReason.TURN: 1}, 3)
    replica.now_s += 1
    replica.add("x")  # takes the place of b
    assert replica.counted.waits == Waits({WaitReason.TURN: 1, WaitReason.DISPLACED: 1}, 4)
    for name in "xb":
        replica.end(name)
    assert replica.counted.waits is NO_WAITS
    replica.end("c")
    replica.add("large", 1, num_tokens=100)
    assert replica.counted.waits == Waits({WaitReason.MEMORY: 1})
    replica.end_all()
    assert replica.counted.waits is NO_WAITS
