from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from deployments.classifier.waiting_line import Job, LineLimits, WaitingLine
from deployments.errors import InvalidRequestError, OverloadedError, ReplicaUnavailableError

ENOUGH = LineLimits(100, None)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def tokens(*lengths: int) -> tuple[tuple[int, ...], ...]:
    return tuple((5,) * length for length in lengths)


def put(line: WaitingLine, stack: ExitStack, *lengths: int) -> Job:
    job = stack.enter_context(line.place())
    line.put(job, tokens(*lengths))
    return job


def test_all_that_is_ready_is_taken_at_once_oldest_first(stack: ExitStack) -> None:
    line = WaitingLine(ENOUGH)
    jobs = [put(line, stack, n) for n in (3, 1, 2)]
    unready = stack.enter_context(line.place())
    assert line.take_all() == jobs
    assert (line.num_running, line.num_waiting) == (3, 1)
    line.put(unready, tokens(1))
    assert line.take_all() == [unready]


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_an_idle_device_has_room_for_one_beside_those_that_may_wait(
    stack: ExitStack, limit: int
) -> None:
    line = WaitingLine(LineLimits(limit, None))
    for _ in range(limit + 1):
        stack.enter_context(line.place())
    with pytest.raises(OverloadedError, match=f"max_queued_requests is {limit}"):
        stack.enter_context(line.place())


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_busy_device_has_room_for_as_many_as_may_wait(stack: ExitStack, limit: int) -> None:
    line = WaitingLine(LineLimits(limit, None))
    put(line, stack, 1)
    line.take_all()
    for _ in range(limit):
        stack.enter_context(line.place())
    with pytest.raises(OverloadedError):
        stack.enter_context(line.place())


def test_who_leaves_makes_room(stack: ExitStack) -> None:
    line = WaitingLine(LineLimits(1, None))
    put(line, stack, 1)
    line.take_all()
    with line.place() as job:
        assert not job.has_left
    assert job.has_left
    stack.enter_context(line.place())


def test_tokens_are_bounded_exactly(stack: ExitStack) -> None:
    line = WaitingLine(LineLimits(100, 10))
    put(line, stack, 8)
    line.take_all()
    put(line, stack, 3, 3)
    job = stack.enter_context(line.place())
    with pytest.raises(OverloadedError, match="6 tokens wait") as refused:
        line.put(job, tokens(5))
    assert refused.value.retry_after_s == 1
    line.put(job, tokens(4))


def test_what_an_idle_device_is_about_to_take_does_not_count(stack: ExitStack) -> None:
    line = WaitingLine(LineLimits(100, 10))
    for n in (9, 6, 4):
        put(line, stack, n)
    with pytest.raises(OverloadedError):
        put(line, stack, 1)


def test_a_request_that_could_never_wait_is_told_so(stack: ExitStack) -> None:
    line = WaitingLine(LineLimits(100, 10))
    with pytest.raises(InvalidRequestError, match="11 tokens, and the model lets 10 wait"):
        put(line, stack, 6, 5)


def test_limits_change_while_requests_wait(stack: ExitStack) -> None:
    line = WaitingLine(LineLimits(0, None))
    put(line, stack, 1)
    line.take_all()
    line.set_limits(LineLimits(2, None))
    waiting = [put(line, stack, 1), put(line, stack, 1)]
    line.set_limits(LineLimits(0, None))
    with pytest.raises(OverloadedError):
        stack.enter_context(line.place())
    assert line.take_all() == waiting


def test_a_refusal_says_when_what_runs_will_have_ended(stack: ExitStack) -> None:
    clock = Clock()
    line = WaitingLine(LineLimits(2, None), clock)
    with ExitStack() as done:
        put(line, done, 1)
        line.take_all()
        for _ in range(2):
            put(line, stack, 1)
        clock.now_s = 4
    line.take_all()
    for _ in range(2):
        put(line, stack, 1)
    clock.now_s = 6
    with pytest.raises(OverloadedError) as refused:
        stack.enter_context(line.place())
    # One has ended in six seconds, and two run; all that waits is taken after them.
    assert refused.value.retry_after_s == 12


def test_who_was_cancelled_is_not_taken(stack: ExitStack) -> None:
    line = WaitingLine(ENOUGH)
    gone, stays = put(line, stack, 1), put(line, stack, 1)
    gone.answer.cancel()
    assert line.take_all() == [stays]
    line.poke()
    assert line.take_all() == []


def test_a_poke_returns_even_if_nobody_waits() -> None:
    line = WaitingLine(ENOUGH)
    line.poke()
    assert line.take_all() == []


def test_a_closed_line_lets_nobody_in_and_tells_those_who_wait(stack: ExitStack) -> None:
    line = WaitingLine(ENOUGH)
    running = put(line, stack, 1)
    line.take_all()
    waiting, unready = put(line, stack, 1), stack.enter_context(line.place())
    line.close()
    assert line.take_all() is None
    line.fail_all(ReplicaUnavailableError("gone"))
    for job in (running, waiting):
        assert isinstance(job.answer.exception(timeout=0), ReplicaUnavailableError)
    with pytest.raises(ReplicaUnavailableError):
        line.put(unready, tokens(1))
    with pytest.raises(ReplicaUnavailableError):
        stack.enter_context(line.place())
