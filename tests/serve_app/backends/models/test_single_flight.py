import asyncio

import pytest

from serve_app.backends.models.single_flight import Remembered, SingleFlight
from tests.stopped_clock import settle


class Work:
    def __init__(self) -> None:
        self.num_calls = 0
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.num_calls += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return self.num_calls


async def test_concurrent_callers_share_one_answer_and_later_ones_get_a_new_one() -> None:
    work = Work()
    flight = SingleFlight(work)
    asking = [asyncio.ensure_future(flight.result()) for _ in range(3)]
    await settle()
    work.gate.set()
    assert await asyncio.gather(*asking) == [1, 1, 1]
    assert await flight.result() == 2


async def test_a_cancelled_caller_does_not_affect_others() -> None:
    work = Work()
    flight = SingleFlight(work)
    first, second = (asyncio.ensure_future(flight.result()) for _ in range(2))
    await settle()
    first.cancel()
    await asyncio.wait([first])
    work.gate.set()
    assert await second == 1


async def test_all_callers_get_the_error_and_the_next_call_tries_again() -> None:
    work = Work()
    work.error = ValueError("broken")
    work.gate.set()
    flight = SingleFlight(work)
    for _ in range(2):
        with pytest.raises(ValueError, match="broken"):
            await flight.result()
    assert work.num_calls == 2


async def test_a_result_is_passed_on_for_a_while() -> None:
    work, now_s = Work(), 0.0
    work.gate.set()
    remembered = Remembered(work, 2.0, lambda: now_s)
    assert [await remembered.result() for _ in range(3)] == [1, 1, 1]
    now_s = 1.9
    assert await remembered.result() == 1
    now_s = 2.0
    asking = [remembered.result() for _ in range(2)]
    assert await asyncio.gather(*asking) == [2, 2]


async def test_an_error_is_passed_on_and_not_remembered() -> None:
    work = Work()
    work.gate.set()
    remembered = Remembered(work, 2.0, lambda: 0.0)
    work.error = ValueError("no")
    with pytest.raises(ValueError, match="no"):
        await remembered.result()
    work.error = None
    assert await remembered.result() == 2


async def test_the_next_result_is_of_work_that_had_not_begun() -> None:
    work = Work()
    remembered = Remembered(work, 2.0, lambda: 0.0)
    first = asyncio.ensure_future(remembered.result())
    await settle()
    following = [asyncio.ensure_future(remembered.next_result()) for _ in range(3)]
    await settle()
    assert work.num_calls == 1
    work.gate.set()
    assert await first == 1
    assert await asyncio.gather(*following) == [2, 2, 2]
    assert await remembered.next_result() == 3
    assert await remembered.result() == 3
