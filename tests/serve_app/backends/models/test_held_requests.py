"""Requests that wait for a model's first replica: whose make room, once as many wait as may."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.contract.claims import Claim
from deployments.contract.errors import OverloadedError, OverloadReason
from serve_app.backends.models.held_requests import HeldRequests

MANY, FEW = Claim(tenant="many"), Claim(tenant="few")


class Requests:
    """Requests that wait until they are let go or refused, by their names."""

    def __init__(self, max_num_held: int) -> None:
        self.held = HeldRequests("m", max_num_held)
        self.ends = asyncio.Event()
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, names: str, claim: Claim, num_places: int = 1) -> None:
        """Let requests come, one after the other."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._wait(claim, num_places))
            await self.settle()

    async def _wait(self, claim: Claim, num_places: int) -> None:
        async with self.held.holding(claim, num_places):
            await self.ends.wait()

    @staticmethod
    async def settle() -> None:
        """Let what is due happen: a refusal takes a few rounds of the event loop."""
        for _ in range(5):
            await asyncio.sleep(0)

    @property
    def refused(self) -> str:
        """Those that were refused, each with the reason that its client is told."""
        refused = [name for name, task in self.tasks.items() if task.done()]
        for name in refused:
            error = self.tasks[name].exception()
            assert isinstance(error, OverloadedError)
            assert error.reason is OverloadReason.LOADING
        return "".join(refused)


@pytest.fixture
async def requests() -> AsyncIterator[Requests]:
    made = Requests(4)
    yield made
    made.ends.set()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)
    async with made.held.holding(MANY, 4):
        pass  # no place is left behind


async def test_with_one_tenant_and_priority_those_that_came_first_stay(requests: Requests) -> None:
    await requests.come("abcdef", MANY)
    assert requests.refused == "ef"


async def test_a_tenant_under_its_part_gets_the_room_of_the_newest_beyond_theirs(
    requests: Requests,
) -> None:
    await requests.come("abcd", MANY)
    await requests.come("xyz", FEW)
    assert requests.refused == "cdz", "each has two of four places"
    await requests.come("e", MANY)
    assert requests.refused == "cdze"


async def test_parts_are_by_weight(requests: Requests) -> None:
    await requests.come("abcd", MANY)
    await requests.come("xyzw", Claim(tenant="few", weight=3))
    assert requests.refused == "bcdw"


async def test_the_newest_of_the_worst_priority_makes_room_for_a_better_one(
    requests: Requests,
) -> None:
    for name, priority in zip("abcd", (0, 2, 2, 1), strict=True):
        await requests.come(name, Claim(priority))
    await requests.come("x", Claim())
    assert requests.refused == "c"
    await requests.come("y", Claim(2))
    assert requests.refused == "cy"


async def test_what_asks_for_several_places_gets_all_or_none(requests: Requests) -> None:
    await requests.come("a", MANY)
    await requests.come("b", MANY, num_places=3)
    await requests.come("x", FEW, num_places=2)
    assert requests.refused == "x", "many would keep one place of the two that are its part"
    await requests.come("y", Claim(-1), num_places=2)
    assert requests.refused == "bx"


async def test_a_request_that_a_replica_had_admitted_is_not_refused_and_makes_no_room(
    requests: Requests,
) -> None:
    await requests.come("abc", MANY)
    await requests.come("r", Claim(5, "many"), num_places=0)
    await requests.come("d", MANY)
    await requests.come("s", MANY, num_places=0)
    await requests.come("x", Claim())
    assert requests.refused == "d"


async def test_the_first_may_be_larger_than_all_places(requests: Requests) -> None:
    await requests.come("a", MANY, num_places=9)
    await requests.come("b", MANY)
    assert requests.refused == "b"


async def test_a_client_that_leaves_while_its_request_makes_room_is_not_refused(
    requests: Requests,
) -> None:
    await requests.come("abcd", Claim(1))
    requests.tasks["x"] = asyncio.create_task(requests._wait(Claim(), 1))
    await asyncio.sleep(0)  # x is in, and d has not heard of it
    leaving = requests.tasks.pop("d")
    assert not leaving.done()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    assert leaving.cancelled()
    assert requests.refused == ""


async def test_another_time_limit_of_the_block_is_no_refusal() -> None:
    held = HeldRequests("m", 1)
    with pytest.raises(TimeoutError):
        async with held.holding(MANY, 1):
            raise TimeoutError
