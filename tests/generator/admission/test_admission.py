import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deployments.contract.errors import InvalidRequestError, OverloadedError, OverloadReason
from deployments.contract.generation import GenerationRequest, RequestGroup
from deployments.contract.sampling_params import SamplingParams
from deployments.generator.admission.admission import Admission, AdmissionLimits
from deployments.generator.admission.permit import Permit
from deployments.plan.kv_layout import KVLayout
from tests.generator.admission.fake_replica import Replica
from tests.hand_clock import HandClock
from tests.stopped_clock import settle

AMPLE = KVLayout((10**10,), (10**10,), 1)


def admission(
    max_num_seqs: int = 2,
    max_queued: int = 3,
    max_tokens: int | None = 100,
    layout: KVLayout = AMPLE,
) -> tuple[Admission, HandClock]:
    clock = HandClock(1000.0)
    limits = AdmissionLimits(max_num_seqs, max_queued, max_tokens)
    return Admission(limits, layout, clock), clock


def request(group: RequestGroup | None = None, *, is_resumed: bool = False) -> GenerationRequest:
    return GenerationRequest("r", "hi", SamplingParams(), is_resumed=is_resumed, group=group)


@contextmanager
def held(
    counted: Admission, num: int, num_tokens: int = 10
) -> Iterator[list[tuple[Permit, ExitStack]]]:
    """Hold `num` permits; closing the stack of one returns it."""
    with ExitStack() as all_of_them:
        permits = []
        for _ in range(num):
            stack = all_of_them.enter_context(ExitStack())
            permit = stack.enter_context(counted.permit(request()))
            counted.weigh(permit, num_tokens, num_tokens)
            permits.append((permit, stack))
        yield permits


def take(counted: Admission, *requests: GenerationRequest) -> None:
    """Take permits and return them."""
    with ExitStack() as stack:
        for each in requests:
            stack.enter_context(counted.permit(each))


def test_as_many_run_and_wait_as_may_and_one_more_is_refused() -> None:
    counted, _ = admission(max_num_seqs=2, max_queued=3)
    with held(counted, 5) as permits:
        assert (counted.num_running, counted.num_waiting) == (2, 3)
        with pytest.raises(OverloadedError, match="2 sequences run and 3 wait") as caught:
            take(counted, request())
        assert caught.value.reason is OverloadReason.REQUESTS
        permits[0][1].close()
        assert (counted.num_running, counted.num_waiting) == (2, 2)
        take(counted, request())
    assert (counted.num_running, counted.num_waiting, counted.num_waiting_tokens) == (0, 0, 0)


def test_only_waiting_sequences_tokens_are_counted() -> None:
    counted, _ = admission(max_num_seqs=2, max_tokens=100)
    with held(counted, 2, num_tokens=1000):
        assert counted.num_waiting_tokens == 0
        with held(counted, 1, num_tokens=60):
            with (
                pytest.raises(OverloadedError, match="60 tokens wait") as caught,
                held(counted, 1, 41),
            ):
                pass
            assert caught.value.reason is OverloadReason.TOKENS
            with held(counted, 1, num_tokens=40):
                assert counted.num_waiting_tokens == 100
        assert counted.num_waiting == 0


def test_without_a_token_limit_only_sequences_are_counted() -> None:
    counted, _ = admission(max_num_seqs=1, max_tokens=None)
    with held(counted, 4, num_tokens=10**9), pytest.raises(OverloadedError, match="wait"):
        take(counted, request())


def test_the_oldest_waiting_sequence_runs_next() -> None:
    counted, _ = admission(max_num_seqs=1, max_tokens=100)
    with held(counted, 1), held(counted, 1, 70), held(counted, 1, 20) as youngest:
        with held(counted, 1, 5):
            assert counted.num_waiting_tokens == 95
        youngest[0][1].close()
        assert counted.num_waiting_tokens == 70


def test_a_group_is_admitted_as_a_whole_or_not_at_all() -> None:
    counted, _ = admission(max_num_seqs=2, max_queued=3)
    first = request(RequestGroup("g", 3, is_first=True))
    with held(counted, 3):
        with pytest.raises(OverloadedError):
            take(counted, first)
        assert counted.num_running + counted.num_waiting == 3
        assert not counted.is_full, "a smaller one would be admitted"
    with held(counted, 2), counted.permit(first) as permit:
        assert (counted.num_running, counted.num_waiting) == (2, 3)
        counted.weigh(permit, 30, 30)
        assert counted.num_waiting_tokens == 90
        other = request(RequestGroup("g", 3, is_first=False))
        with counted.permit(other) as sibling:
            counted.weigh(sibling, 10, 10)
            assert counted.num_waiting_tokens == 70
            with pytest.raises(OverloadedError):
                take(counted, request())
            assert counted.is_full
        assert counted.num_waiting == 2
        assert not counted.is_full
    assert (counted.num_running, counted.num_waiting, counted.num_waiting_tokens) == (0, 0, 0)


def test_a_group_with_too_many_tokens_is_refused_as_a_whole() -> None:
    counted, _ = admission(max_num_seqs=1, max_tokens=100)
    with held(counted, 1):
        with (
            pytest.raises(OverloadedError, match="tokens"),
            counted.permit(request(RequestGroup("g", 3, is_first=True))) as permit,
        ):
            counted.weigh(permit, 34, 34)
        assert counted.num_waiting == 0


def test_a_group_beyond_all_limits_is_an_invalid_request() -> None:
    counted, _ = admission(max_num_seqs=2, max_queued=3)
    with pytest.raises(InvalidRequestError, match=r"6 texts at once.*5 at most"):
        take(counted, request(RequestGroup("g", 6, is_first=True)))


def test_sequences_that_another_replica_has_admitted_bypass_the_limits() -> None:
    counted, _ = admission(max_num_seqs=1, max_queued=1, max_tokens=100)
    member = request(RequestGroup("elsewhere", 9, is_first=False))
    with held(counted, 2, 100):
        for each in (request(is_resumed=True), member, request(member.group, is_resumed=True)):
            with counted.permit(each) as permit:
                counted.weigh(permit, 1000, 1000)
                assert counted.num_waiting == 2
    assert (counted.num_running, counted.num_waiting, counted.num_waiting_tokens) == (0, 0, 0)


async def test_resumed_sequences_run_next_in_turn() -> None:
    counted, _ = admission(max_num_seqs=1)
    with ExitStack() as stack, held(counted, 2) as permits:
        resumed = [
            (stack.enter_context(each := ExitStack()), each.enter_context(counted.permit(again)))
            for again in [request(is_resumed=True)] * 2
        ]
        waits = [asyncio.ensure_future(permit.wait_for_turn()) for _, permit in resumed]
        await settle()
        permits[0][1].close()
        await waits[0]
        assert not waits[1].done()
        resumed[0][0].close()
        await waits[1]
        assert counted.num_waiting == 1, "the new one is still behind them"
        await resumed[1][1].wait_for_turn()


def test_a_resumed_first_sequence_takes_no_permits_for_its_group() -> None:
    counted, _ = admission()
    with counted.permit(request(RequestGroup("g", 3, is_first=True), is_resumed=True)):
        assert (counted.num_running, counted.num_waiting) == (1, 0)
    assert counted.num_running == 0


def test_siblings_keep_their_permits_after_the_first_has_ended() -> None:
    counted, _ = admission(max_num_seqs=1)
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        group = RequestGroup("g", 3, is_first=True)
        counted.weigh(first.enter_context(counted.permit(request(group))), 9, 9)
        sibling = counted.permit(request(RequestGroup("g", 3, is_first=False)))
        counted.weigh(stack.enter_context(sibling), 9, 9)
        first.close()
        assert (counted.num_running, counted.num_waiting) == (1, 0)
        late = counted.permit(request(RequestGroup("g", 3, is_first=False)))
        counted.weigh(stack.enter_context(late), 9, 9)
        assert (counted.num_running, counted.num_waiting) == (1, 1)
    assert (counted.num_running, counted.num_waiting) == (0, 0)


def test_a_group_that_comes_again_before_its_first_call_has_ended_leaves_no_permit() -> None:
    counted, _ = admission(max_num_seqs=2, max_queued=4)
    first = request(RequestGroup("g", 3, is_first=True))
    lost, again = ExitStack(), ExitStack()
    lost.enter_context(counted.permit(first))
    again.enter_context(counted.permit(first))
    lost.close()
    assert (counted.num_running, counted.num_waiting) == (2, 1)
    take(counted, request(RequestGroup("g", 3, is_first=False)))
    assert counted.num_running + counted.num_waiting == 2, "it had one of the reserved permits"
    again.close()
    assert (counted.num_running, counted.num_waiting) == (0, 0)


def refusal(counted: Admission, size: int = 1) -> float | None:
    """Return `retry_after_s` of a refused request."""
    group = RequestGroup("refused", size, is_first=True) if size > 1 else None
    with pytest.raises(OverloadedError) as caught:
        take(counted, request(group))
    return caught.value.retry_after_s


def test_retry_after_is_the_time_until_enough_sequences_end() -> None:
    counted, clock = admission(max_num_seqs=1, max_queued=3, max_tokens=None)
    with held(counted, 4) as permits:
        clock.now_s += 5
        permits[0][1].close()
        with held(counted, 1):
            assert refusal(counted) == 5
            assert refusal(counted, size=3) == 15


def test_retry_after_for_tokens_is_the_time_until_enough_run() -> None:
    counted, clock = admission(max_num_seqs=1, max_queued=9, max_tokens=100)
    with held(counted, 1) as first:
        clock.now_s += 3
        first[0][1].close()
        with held(counted, 1), held(counted, 4, 25):
            clock.now_s += 0.5
            with pytest.raises(OverloadedError) as caught, held(counted, 1, 60):
                pass
    # There is room for 60 after the third end, and one has ended in 0.5 s of work.
    assert caught.value.retry_after_s == 2


@pytest.mark.parametrize(("waited_s", "told_s"), [(0, 1), (0.2, 1), (7.2, 8), (3600, 30)])
def test_retry_after_stays_in_bounds_if_nothing_has_ended(waited_s: float, told_s: int) -> None:
    counted, clock = admission(max_num_seqs=1, max_queued=0)
    with held(counted, 1):
        clock.now_s += waited_s
        assert refusal(counted) == told_s


def test_retry_after_is_at_most_a_minute() -> None:
    counted, clock = admission(max_num_seqs=1, max_queued=4)
    with held(counted, 5):
        clock.now_s += 3600
        assert refusal(counted, size=5) == 60


def test_refused_sequences_do_not_count_as_throughput() -> None:
    counted, clock = admission(max_num_seqs=1, max_queued=1)
    with held(counted, 1):
        clock.now_s += 10
        for _ in range(5):
            take(counted, request())
        with held(counted, 1):
            assert refusal(counted) == 10


def test_lower_limits_revoke_no_permits() -> None:
    counted, _ = admission(max_num_seqs=1, max_queued=3)
    with held(counted, 4) as permits:
        counted.set_limits(1, 20)
        assert counted.num_waiting == 3
        permits[0][1].close()
        permits[1][1].close()
        with pytest.raises(OverloadedError):
            take(counted, request())
        permits[2][1].close()
        take(counted, request())


class AdmissionMachine(RuleBasedStateMachine):
    """Takes and returns permits at random, and compares the counts with a list."""

    def __init__(self) -> None:
        super().__init__()
        self.counted, self.clock = admission(max_num_seqs=2, max_queued=3, max_tokens=100)
        self.held: list[tuple[int, ExitStack]] = []  # tokens, oldest first
        self.num_groups = 0
        self.told_s: list[float | None] = []

    def expected(self) -> tuple[int, int, int]:
        return (
            len(self.held[:2]), len(self.held[2:]), sum(tokens for tokens, _ in self.held[2:])
        )  # fmt: skip

    @rule(num_tokens=st.integers(1, 70), fails=st.booleans())
    def arrive(self, num_tokens: int, fails: bool) -> None:
        stack = ExitStack()
        waits = len(self.held) >= 2
        tokens = self.expected()[2] + num_tokens
        try:
            permit = stack.enter_context(self.counted.permit(request()))
            if fails:  # in validation, for example
                stack.close()
                return
            self.counted.weigh(permit, num_tokens, num_tokens)
        except OverloadedError as error:
            stack.close()
            self.told_s.append(error.retry_after_s)
            assert len(self.held) == 5 or (waits and tokens > 100)
        else:
            assert len(self.held) < 5
            assert not waits or tokens <= 100
            self.held.append((num_tokens, stack))

    @rule(size=st.integers(2, 6), num_tokens=st.integers(1, 40), num_come=st.integers(0, 5))
    def arrive_together(self, size: int, num_tokens: int, num_come: int) -> None:
        self.num_groups += 1
        name = str(self.num_groups)
        num_held, (_, _, tokens) = len(self.held), self.expected()
        first = ExitStack()
        num_waiting = max(0, num_held + size - 2) - max(0, num_held - 2)
        try:
            group = RequestGroup(name, size, is_first=True)
            permit = first.enter_context(self.counted.permit(request(group)))
            self.counted.weigh(permit, num_tokens, num_tokens)
        except InvalidRequestError:
            assert size > 5
        except OverloadedError:
            first.close()
            assert num_held + size > 5 or (num_waiting and tokens + num_waiting * num_tokens > 100)
        else:
            assert num_held + size <= 5
            stacks = [ExitStack() for _ in range(min(num_come, size - 1))]
            for stack in stacks:
                member = request(RequestGroup(name, size, is_first=False))
                permit = stack.enter_context(self.counted.permit(member))
                self.counted.weigh(permit, num_tokens, num_tokens)
            # The client leaves: all of them end.
            for stack in (*stacks, first):
                stack.close()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        _, stack = self.held.pop(index)
        stack.close()
        stack.close()

    @rule(seconds=st.floats(0, 100))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @invariant()
    def counts_match_the_held_permits(self) -> None:
        found = self.counted
        assert (found.num_running, found.num_waiting, found.num_waiting_tokens) == self.expected()

    @invariant()
    def each_refusal_says_when_to_retry(self) -> None:
        assert all(seconds is not None and 1 <= seconds <= 60 for seconds in self.told_s)

    def teardown(self) -> None:
        for _, stack in self.held:
            stack.close()
        assert self.counted.num_running == self.counted.num_waiting == 0


TestAdmissionMachine = pytest.mark.slow(AdmissionMachine.TestCase)
TestAdmissionMachine.settings = settings(max_examples=60, deadline=None)


def test_all_that_may_be_parked_are_at_once_whether_or_not_they_have_begun() -> None:
    replica = Replica(max_num_seqs=2)
    for name in "abcd":
        replica.add(name)
    replica.come("e")  # its prompt is still being encoded
    replica.runs["b"].may_park = False
    replica.engine.begun |= {"a", "b"}
    num_entered = replica.engine.num_entered
    replica.counted.park_all()
    assert replica.parked == "acd"
    assert replica.inside == "b"
    assert replica.engine.num_entered == num_entered, "none of those that leave goes in first"
    assert (replica.counted.num_running, replica.counted.num_waiting) == (2, 0)
    replica.accept("e")
    replica.counted.park_all()
    assert (replica.parked, replica.inside) == ("acde", "b")


def test_all_that_are_accepted_are_aborted_and_no_other() -> None:
    replica = Replica(max_num_seqs=2)
    for name in "abc":
        replica.add(name)
    replica.come("d")
    replica.runs["b"].may_park = False
    replica.counted.abort_all()
    assert [name for name, run in replica.runs.items() if run.is_aborted] == ["a", "b", "c"]
    assert replica.inside == replica.parked == ""
    replica.accept("d")
    assert replica.inside == "d"
