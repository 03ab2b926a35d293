import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from deployments.contract.claims import NO_CLAIM, Claim, FairShares
from deployments.contract.errors import OverloadReason
from serve_app.backends.replicas.admission_queue import AdmissionQueue, FullError
from tests.stopped_clock import settle, stop_clock


class Asked:
    """Requests that are asking, each waiting for its answer."""

    def __init__(self) -> None:
        self.names: list[int] = []
        self._answers: dict[int, asyncio.Future[str]] = {}

    def asker(self, name: int) -> Callable[[], Awaitable[str]]:
        async def ask() -> str:
            self.names.append(name)
            self._answers[name] = asyncio.get_running_loop().create_future()
            return await self._answers[name]

        return ask

    def take(self, name: int) -> None:
        self._answers[name].set_result(f"taken {name}")

    def refuse(self, name: int) -> None:
        self._answers[name].set_exception(FullError("full", 3, OverloadReason.TOKENS, "a"))

    def fail(self, name: int) -> None:
        self._answers[name].set_exception(ValueError("broken"))


class Requests:
    """Requests in a queue that lets two ask at once."""

    def __init__(self) -> None:
        self.asked = Asked()
        self.tasks: dict[int, asyncio.Task[str]] = {}
        self.shares = FairShares()
        self._queue = AdmissionQueue(self.shares, max_num_asking=2)

    async def arrive(self, names: Iterable[int], claim: Claim = NO_CLAIM) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._queue.run(self.asked.asker(name), claim))
        await settle()

    def refused(self) -> list[int]:
        return [
            name
            for name, task in self.tasks.items()
            if task.done() and not task.cancelled() and isinstance(task.exception(), FullError)
        ]


async def test_a_bounded_number_asks_at_once_and_the_others_follow_in_order() -> None:
    queued = Requests()
    await queued.arrive(range(5))
    assert queued.asked.names == [0, 1]
    queued.asked.take(1)
    await settle()
    assert queued.asked.names == [0, 1, 2]
    queued.asked.fail(0)
    await settle()
    assert queued.asked.names == [0, 1, 2, 3]
    assert await queued.tasks[1] == "taken 1"
    with pytest.raises(ValueError, match="broken"):
        await queued.tasks[0]
    for name in (2, 3):
        queued.asked.take(name)
    await settle()
    queued.asked.take(4)
    assert await queued.tasks[4] == "taken 4"


async def test_a_full_refusal_is_shared_by_requests_queued_when_the_question_was_sent() -> None:
    queued = Requests()
    await queued.arrive(range(2))
    await queued.arrive(range(2, 6))
    queued.asked.take(0)
    await settle()
    assert queued.asked.names == [0, 1, 2]
    await queued.arrive(range(6, 8))
    queued.asked.refuse(2)
    await settle()
    assert queued.refused() == [2, 3, 4, 5]
    assert queued.asked.names == [0, 1, 2, 6], (
        "a request that arrived after the question asks for itself"
    )
    refusals = [queued.tasks[name].exception() for name in (2, 3)]
    assert refusals[0] is not refusals[1]
    assert all(isinstance(r, FullError) and r.retry_after_s == 3 for r in refusals)
    queued.asked.take(1)
    await settle()
    for name in (6, 7):
        queued.asked.take(name)
    assert await queued.tasks[7] == "taken 7"


async def test_a_full_refusal_is_not_shared_by_requests_that_arrived_after_the_question() -> None:
    queued = Requests()
    await queued.arrive(range(2))
    await queued.arrive(range(2, 4))
    queued.asked.refuse(0)
    await settle()
    assert queued.refused() == [0]
    assert queued.asked.names == [0, 1, 2]
    queued.asked.take(1)
    await settle()
    assert queued.asked.names == [0, 1, 2, 3]
    for name in (2, 3):
        queued.asked.take(name)
    assert await queued.tasks[3] == "taken 3"


async def test_a_request_cancelled_in_the_queue_holds_up_no_other() -> None:
    queued = Requests()
    await queued.arrive(range(6))
    queued.tasks[3].cancel()
    queued.asked.take(0)
    await settle()
    queued.asked.refuse(2)
    await settle()
    assert queued.refused() == [2, 4, 5]
    queued.asked.take(1)
    await queued.arrive([6, 7])
    assert queued.asked.names == [0, 1, 2, 6, 7]


async def test_a_request_cancelled_just_as_its_turn_comes_passes_the_turn_on() -> None:
    queued = Requests()
    await queued.arrive(range(4))
    queued.asked.take(0)
    await asyncio.sleep(0)
    assert queued.tasks[0].done()
    queued.tasks[2].cancel()
    await settle()
    assert queued.tasks[2].cancelled()
    assert queued.asked.names == [0, 1, 3]


async def test_a_request_cancelled_while_it_asks_passes_its_turn_on() -> None:
    queued = Requests()
    await queued.arrive(range(3))
    queued.tasks[0].cancel()
    await settle()
    assert queued.asked.names == [0, 1, 2]


A, B = Claim(tenant="a"), Claim(tenant="b")


async def test_a_better_priority_asks_first_whoever_came_before() -> None:
    queued = Requests()
    await queued.arrive(range(2))
    await queued.arrive([2], Claim(priority=1))
    await queued.arrive([3])
    await queued.arrive([4], Claim(priority=-1))
    for name in (0, 4, 3):
        queued.asked.take(name)
        await settle()
    assert queued.asked.names == [0, 1, 4, 3, 2]
    for name in (1, 2):
        queued.asked.take(name)


async def test_who_has_waited_longest_asks_before_ever_new_requests_of_a_better_priority(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advance = stop_clock(monkeypatch)
    queued = Requests()
    await queued.arrive(range(2))
    await queued.arrive([2], Claim(priority=1))
    for name in range(3, 7):
        advance(25)
        await queued.arrive([name])
        queued.asked.take(queued.asked.names[-1])
        await settle()
    assert queued.asked.names == [0, 1, 3, 4, 2, 5], "2 came 75 s before 5"
    for name in (0, 5):
        queued.asked.take(name)
    await settle()
    queued.asked.take(6)


async def test_of_a_priority_the_tenant_with_the_least_service_asks_first() -> None:
    queued = Requests()
    await queued.arrive(range(2), A)
    queued.shares.charge(A, 100)
    await queued.arrive([2, 3], A)
    await queued.arrive([4, 5], B)
    queued.shares.charge(A, 1)
    queued.asked.take(0)
    await settle()
    assert queued.asked.names == [0, 1, 4]
    queued.shares.charge(B, 50)
    queued.asked.take(1)
    await settle()
    assert queued.asked.names == [0, 1, 4, 2]
    for name in (4, 2):
        queued.asked.take(name)
    await settle()
    for name in (3, 5):
        queued.asked.take(name)


async def test_a_full_refusal_is_told_to_the_same_tenant_with_no_better_priority() -> None:
    queued = Requests()
    await queued.arrive(range(2), A)
    await queued.arrive([2, 3], A)
    await queued.arrive([4], B)
    queued.shares.charge(B, 1)
    await queued.arrive([5], Claim(tenant="a", priority=1))
    await queued.arrive([6], Claim(tenant="a", priority=-1))
    queued.asked.take(0)
    await settle()
    assert queued.asked.names == [0, 1, 6]
    queued.asked.take(6)
    await settle()
    assert queued.asked.names == [0, 1, 6, 2]
    queued.asked.refuse(2)
    await settle()
    assert queued.refused() == [2, 3, 5]
    assert queued.asked.names == [0, 1, 6, 2, 4]
    for name in (1, 4):
        queued.asked.take(name)
