from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from deployments.contract.claims import Claim, TenantService
from deployments.contract.errors import (
    InvalidRequestError,
    OverloadedError,
    OverloadReason,
    ReplicaUnavailableError,
)
from deployments.plan.replica_report import NO_WAITS, Waits
from deployments.pooling.request_queue import Job, QueueLimits, RequestQueue, TurnOverError
from tests.hand_clock import HandClock

ENOUGH = QueueLimits(100, None)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tokens(*lengths: int) -> tuple[tuple[int, ...], ...]:
    return tuple((5,) * length for length in lengths)


def put(queue: RequestQueue, stack: ExitStack, *lengths: int, claim: Claim | None = None) -> Job:
    job = stack.enter_context(queue.entered(claim))
    queue.put(job, tokens(*lengths))
    return job


def test_all_ready_requests_are_taken_at_once_oldest_first(stack: ExitStack) -> None:
    queue = RequestQueue(ENOUGH)
    jobs = [put(queue, stack, n) for n in (3, 1, 2)]
    unready = stack.enter_context(queue.entered())
    assert [job.taken_s for job in jobs] == [None] * 3
    assert queue.take_all() == jobs
    assert all(job.taken_s is not None for job in jobs)
    assert (queue.num_running, queue.num_waiting) == (3, 1)
    queue.put(unready, tokens(1))
    assert queue.take_all() == [unready]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_an_idle_device_has_room_for_one_more_than_may_wait(stack: ExitStack, limit: int) -> None:
    queue = RequestQueue(QueueLimits(limit, None))
    for _ in range(limit + 1):
        stack.enter_context(queue.entered())
    with pytest.raises(OverloadedError, match=f"max_queued_requests is {limit}"):
        stack.enter_context(queue.entered())


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_busy_device_has_room_for_as_many_as_may_wait(stack: ExitStack, limit: int) -> None:
    queue = RequestQueue(QueueLimits(limit, None))
    put(queue, stack, 1)
    queue.take_all()
    for _ in range(limit):
        stack.enter_context(queue.entered())
    with pytest.raises(OverloadedError):
        stack.enter_context(queue.entered())


def test_a_request_that_leaves_makes_room(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(1, None))
    put(queue, stack, 1)
    queue.take_all()
    with queue.entered() as job:
        assert not job.has_left
    assert job.has_left
    stack.enter_context(queue.entered())


def test_tokens_are_bounded_exactly(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(100, 10), HandClock())
    put(queue, stack, 8)
    queue.take_all()
    put(queue, stack, 3, 3)
    job = stack.enter_context(queue.entered())
    with pytest.raises(OverloadedError, match="6 tokens wait") as refused:
        queue.put(job, tokens(5))
    assert refused.value.retry_after_s == 1
    queue.put(job, tokens(4))


def test_the_request_that_an_idle_device_takes_next_does_not_count(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(100, 10))
    for n in (9, 6, 4):
        put(queue, stack, n)
    with pytest.raises(OverloadedError):
        put(queue, stack, 1)


def test_a_request_with_more_tokens_than_may_wait_is_invalid(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(100, 10))
    with pytest.raises(InvalidRequestError, match="11 tokens, and at most 10 may wait"):
        put(queue, stack, 6, 5)


def test_limits_change_while_requests_wait(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(0, None))
    put(queue, stack, 1)
    queue.take_all()
    queue.set_limits(QueueLimits(2, None))
    waiting = [put(queue, stack, 1), put(queue, stack, 1)]
    queue.set_limits(QueueLimits(0, None))
    with pytest.raises(OverloadedError):
        stack.enter_context(queue.entered())
    assert queue.take_all() == waiting


def test_the_longest_wait_is_that_of_the_oldest_request(stack: ExitStack) -> None:
    clock = HandClock()
    queue = RequestQueue(ENOUGH, clock)
    assert queue.waits is NO_WAITS
    alice, bob = Claim(tenant="alice"), Claim(tenant="bob", weight=2)
    put(queue, stack, 8, claim=alice)
    clock.now_s = 3
    put(queue, stack, 8, claim=bob)
    clock.now_s = 4
    queue.charge([(alice, 30)])
    assert queue.waits == Waits(longest_s=4, service_gap_tokens=30)
    assert queue.of_tenants(1) == (TenantService("bob", 2, 1, 0),)
    queue.take_all()
    assert queue.waits is NO_WAITS


def test_a_refusal_says_when_the_running_requests_will_have_ended(stack: ExitStack) -> None:
    clock = HandClock()
    queue = RequestQueue(QueueLimits(2, None), clock)
    with ExitStack() as done:
        put(queue, done, 1)
        queue.take_all()
        for _ in range(2):
            put(queue, stack, 1)
        clock.now_s = 4
    queue.take_all()
    for _ in range(2):
        put(queue, stack, 1)
    clock.now_s = 6
    with pytest.raises(OverloadedError) as refused:
        stack.enter_context(queue.entered())
    # One has ended in six seconds, and two run; all waiting ones are taken after them.
    assert refused.value.retry_after_s == 12


def test_a_cancelled_request_is_not_taken(stack: ExitStack) -> None:
    queue = RequestQueue(ENOUGH)
    gone, stays = put(queue, stack, 1), put(queue, stack, 1)
    gone.answer.cancel()
    assert queue.take_all() == [stays]
    queue.poke()
    assert queue.take_all() == []


def test_a_poke_returns_from_an_empty_queue() -> None:
    queue = RequestQueue(ENOUGH)
    queue.poke()
    assert queue.take_all() == []


def test_a_closed_queue_accepts_nothing_and_fails_its_requests(stack: ExitStack) -> None:
    queue = RequestQueue(ENOUGH)
    running = put(queue, stack, 1)
    queue.take_all()
    waiting, unready = put(queue, stack, 1), stack.enter_context(queue.entered())
    queue.close()
    assert queue.take_all() is None
    queue.fail_all(ReplicaUnavailableError("gone"))
    for job in (running, waiting):
        assert isinstance(job.answer.exception(timeout=0), ReplicaUnavailableError)
    with pytest.raises(ReplicaUnavailableError):
        queue.put(unready, tokens(1))
    with pytest.raises(ReplicaUnavailableError):
        stack.enter_context(queue.entered())


A, B = Claim(tenant="a"), Claim(tenant="b")


def test_a_tenant_under_its_share_gets_the_room_of_one_beyond_its_own(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(4, None))
    put(queue, stack, 1, claim=A)
    queue.take_all()
    kept = [put(queue, stack, 1, claim=A) for _ in range(2)]
    gone = [put(queue, stack, 1, claim=A), stack.enter_context(queue.entered(A))]
    mine = [put(queue, stack, 1, claim=B) for _ in range(2)]
    with pytest.raises(OverloadedError, match="4 requests wait"):
        put(queue, stack, 1, claim=B)
    with pytest.raises(OverloadedError):
        put(queue, stack, 1, claim=A)
    with pytest.raises(OverloadedError, match=r"4 requests wait \(max_queued_requests is 4\)"):
        gone[0].answer.result()
    with pytest.raises(OverloadedError):
        queue.put(gone[1], tokens(1))
    assert queue.num_waiting == 4
    assert set(queue.take_all() or ()) == {*kept, *mine}


def test_room_in_tokens_is_shared_too(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(100, 10))
    put(queue, stack, 1, claim=A)
    queue.take_all()
    jobs = [put(queue, stack, 2, claim=A) for _ in range(5)]
    put(queue, stack, 3, claim=B)
    assert [job.answer.done() for job in jobs] == [False] * 3 + [True] * 2
    with pytest.raises(OverloadedError) as caught:
        put(queue, stack, 5, claim=B)
    assert caught.value.reason is OverloadReason.TOKENS


def test_what_waits_is_taken_by_priority_share_and_age(stack: ExitStack) -> None:
    queue = RequestQueue(ENOUGH)
    late = put(queue, stack, 1, claim=Claim(1, "a"))
    mine = [put(queue, stack, 1, claim=A) for _ in range(2)]
    other = put(queue, stack, 1, claim=B)
    queue.charge([(A, 10)])
    assert queue.take_others({(1, "a")}) == [other, *mine]
    assert queue.take_all() == [late]


def test_who_has_waited_long_goes_before_a_better_priority(stack: ExitStack) -> None:
    clock = HandClock()
    queue = RequestQueue(ENOUGH, clock, priority_aging_s=60)
    old = put(queue, stack, 1, claim=Claim(1, "a"))
    clock.now_s += 59
    better = put(queue, stack, 1, claim=B)
    assert queue.in_order({A.queue: 1, (1, "a"): -60}) == [(1, "a"), A.queue]
    assert queue.take_all() == [better, old]
    old = put(queue, stack, 1, claim=Claim(1, "a"))
    clock.now_s += 61
    better = put(queue, stack, 1, claim=B)
    assert queue.take_all() == [old, better]


def test_one_tenant_s_requests_are_taken_from_beside_a_sweep_only_at_its_end(
    stack: ExitStack,
) -> None:
    queue = RequestQueue(ENOUGH)
    put(queue, stack, 1, claim=A)
    assert queue.take_others({A.queue}) == []


def test_requests_of_a_tenant_are_taken_by_arrival_whichever_was_encoded_first(
    stack: ExitStack,
) -> None:
    clock = HandClock()
    queue = RequestQueue(ENOUGH, clock)
    jobs = []
    for _ in range(3):
        jobs.append(stack.enter_context(queue.entered(A)))
        clock.now_s += 1
    for job in reversed(jobs):
        queue.put(job, tokens(1))
    assert queue.take_others({B.queue}) == jobs


def test_what_has_left_or_made_room_is_not_taken(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(3, None))
    put(queue, stack, 1, claim=B)
    queue.take_all()
    with ExitStack() as client:
        put(queue, client, 1, claim=A)
    kept = [put(queue, stack, 1, claim=A) for _ in range(2)]
    refused = put(queue, stack, 1, claim=A)
    mine = put(queue, stack, 1, claim=Claim(0, "c"))
    assert refused.answer.done()
    assert queue.take_others({B.queue}) == [*kept, mine]
    assert queue.take_others({B.queue}) == []


def test_those_that_wait_for_their_tenant_s_sweep_to_end_are_not_looked_at(
    stack: ExitStack,
) -> None:
    class Seen(Claim):
        num_times = 0

        @property
        def queue(self) -> tuple[int, str]:
            Seen.num_times += 1
            return 0, "a"

    queue = RequestQueue(ENOUGH)
    jobs = [put(queue, stack, 1, claim=Seen()) for _ in range(20)]
    other = put(queue, stack, 1, claim=B)
    Seen.num_times = 0
    assert queue.take_others({A.queue}) == [other]
    assert Seen.num_times == 0
    assert queue.take_all() == jobs


def test_waiting_tokens_are_those_of_what_waits(stack: ExitStack) -> None:
    queue = RequestQueue(QueueLimits(3, None))
    put(queue, stack, 9, claim=B)
    assert queue.num_waiting_tokens == 9
    queue.take_all()
    with ExitStack() as client:
        put(queue, client, 7, claim=A)
        assert queue.num_waiting_tokens == 7
    for number in (1, 2, 4):
        put(queue, stack, number, claim=A)
    assert queue.num_waiting_tokens == 7
    put(queue, stack, 8, claim=Claim(0, "c"))  # in the room of the newest
    assert queue.num_waiting_tokens == 1 + 2 + 8
    queue.take_others({A.queue})
    assert queue.num_waiting_tokens == 1 + 2


def test_when_the_turn_is_over_what_has_begun_goes_on_and_all_else_is_given_back(
    stack: ExitStack,
) -> None:
    queue = RequestQueue(ENOUGH)
    begun, taken = put(queue, stack, 1), put(queue, stack, 1)
    queue.take_all()
    begun.has_begun = True
    ready, unready = put(queue, stack, 1), stack.enter_context(queue.entered())
    queue.give_back()
    assert [isinstance(each.answer.exception(0), TurnOverError) for each in (taken, ready)] == [
        True,
        True,
    ]
    assert not begun.answer.done()
    assert not unready.answer.done(), "it is put into the next turn's queue"
    assert (queue.num_running, queue.num_waiting, queue.num_waiting_tokens) == (1, 1, 0)
    queue.give_back(begun=True)
    assert isinstance(begun.answer.exception(0), TurnOverError)
    queue.give_back(begun=True)  # nothing ends twice


def test_a_request_that_is_answered_or_has_left_when_the_turn_ends_stays_so(
    stack: ExitStack,
) -> None:
    queue = RequestQueue(ENOUGH)
    answered, left = put(queue, stack, 1), put(queue, stack, 1)
    left.answer.cancel()
    assert queue.take_all() == [answered]
    answered.answer.set_result([])
    queue.give_back(begun=True)
    assert answered.answer.result(0) == []
    assert left.answer.cancelled()
