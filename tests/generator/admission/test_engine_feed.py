"""What is in the engine, in the order in which the engine begins with it."""

from hypothesis import given
from hypothesis import strategies as st

from tests.generator.admission.fake_replica import Replica

ARRIVALS = st.tuples(
    st.integers(0, 2),  # priority
    st.sampled_from(["", "few", "many"]),  # tenant
    st.integers(1, 60),  # tokens
    st.booleans(),  # whether another replica had accepted it
)
ENDS = st.integers(0, 99)


def test_a_displaced_sequence_stands_behind_all_whose_turn_it_is() -> None:
    replica = Replica(max_num_seqs=4)
    replica.add("a", 1, 80)
    replica.add("x", 0, 50)
    assert replica.inside == "xa"
    replica.add("y", 0, 30)
    assert (replica.running, replica.inside) == ("xy", "xya"), "the engine would wait for a"


def test_a_resumed_sequence_does_not_go_before_a_tenant_that_got_less() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("-", tenant="other")
    replica.add("a", tenant="many", is_resumed=True)
    replica.add("x", tenant="few")
    replica.counted.charge(replica.permits["a"], 1000)
    replica.add("z", tenant="many")
    assert replica.inside == "-xa"


def test_what_the_engine_has_begun_with_stays_when_another_comes_before_it() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("-", tenant="other")
    replica.add("a", tenant="many")
    replica.add("x", tenant="few")
    assert replica.inside == "-ax"
    replica.engine.begun.add("a")  # its first delta is on its way
    replica.counted.charge(replica.permits["a"], 1000)
    replica.end("-")
    assert (replica.running, replica.inside) == ("x", "ax")
    assert replica.engine.num_entered == 4, "only x left, and came again"
    replica.end("x")
    assert (replica.running, replica.inside) == ("a", "a")


def test_two_are_ahead_beside_those_that_the_engine_has_begun_with() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("-", tenant="other")
    for name in "abcd":
        replica.add(name, tenant=name)
    assert replica.inside == "-ab"
    replica.engine.begun |= {"a", "b"}  # their first deltas are on their way
    replica.come("e", tenant="e", waited_s=30)
    replica.accept("e")
    assert (replica.running, replica.inside) == ("-", "-abcd")
    for name in "cd":
        replica.counted.charge(replica.permits[name], 1)
    replica.add("f", tenant="f")
    assert replica.inside == "-abef", "c and d got more, and are taken out"


def test_those_that_are_ahead_keep_their_order_when_one_kind_is_left() -> None:
    replica = Replica(max_num_seqs=1)
    replica.add("x", 0)
    for name, is_resumed in (("a", False), ("r", True), ("b", False), ("s", True)):
        replica.add(name, 1, is_resumed=is_resumed)
    assert replica.inside == "xrs"
    replica.end("x")
    assert (replica.running, replica.inside) == ("r", "rsab")


def test_one_that_is_encoded_slowly_goes_before_those_of_another_kind() -> None:
    replica = Replica(max_num_seqs=2)
    replica.add("a", 1)
    replica.come("slow", 0)
    replica.add("b", 1)
    replica.accept("slow")
    assert list(replica.engine.turns) == ["a", "slow", "b"]


def test_one_that_is_encoded_slowly_goes_behind_those_of_its_own_kind() -> None:
    replica = Replica(max_num_seqs=1)
    replica.come("a")
    replica.add("b")
    replica.accept("a")
    assert (replica.running, replica.inside) == ("a", "ba")
    assert replica.engine.num_entered == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 60), st.booleans()) | ENDS))
def test_with_one_kind_the_engine_gets_each_sequence_once_as_it_is_accepted(
    events: list[tuple[int, int, bool] | int],
) -> None:
    replica = Replica(max_num_seqs=3, max_queued=200)
    coming: list[tuple[str, int, bool]] = []
    accepted: list[tuple[bool, int, str]] = []
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            place, num_tokens, is_resumed = event
            replica.come(str(number), is_resumed=is_resumed)
            coming.insert(place % (len(coming) + 1), (str(number), num_tokens, is_resumed))
        elif event % 2 and coming:
            name, num_tokens, is_resumed = coming.pop(0)
            replica.accept(name, num_tokens)
            accepted.append((not is_resumed, len(replica.runs), name))
        elif accepted:
            ended = sorted(accepted)[event % len(accepted)]
            replica.end(ended[2])
        accepted = [each for each in accepted if each[2] in replica.stacks]
        assert replica.counted.num_outside == 0
        names = sorted(replica.engine.turns, key=replica.engine.turns.__getitem__)
        assert names == [name for *_, name in sorted(accepted)]
    assert replica.engine.num_entered == len(replica.runs)
    replica.end_all()


@given(st.lists(ARRIVALS | ENDS, max_size=40))
def test_with_several_kinds_none_stands_before_one_whose_turn_it_is(
    events: list[tuple[int, str, int, bool] | int],
) -> None:
    replica = Replica(max_num_seqs=3, max_queued=200)
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            priority, tenant, num_tokens, is_resumed = event
            name = str(number)
            replica.add(name, priority, num_tokens, tenant=tenant, is_resumed=is_resumed)
            replica.counted.charge(replica.permits[name], num_tokens)
        elif replica.stacks:
            replica.end(list(replica.stacks)[event % len(replica.stacks)])
        kinds = {replica.permits[name].claim.queue for name in replica.stacks}
        turns = replica.engine.turns
        names = sorted(turns, key=turns.__getitem__)
        have_turn = [replica.permits[name].is_running for name in names]
        assert have_turn.count(True) == replica.counted.num_running
        if len(kinds) > 1:
            assert have_turn == sorted(have_turn, reverse=True)
            assert have_turn.count(False) == min(2, replica.counted.num_waiting)
    replica.end_all()
