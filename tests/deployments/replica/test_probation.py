import asyncio

import pytest

from deployments.contract.generation import PROBATION_TOKENS_AGAIN
from deployments.replica.probation import Probation
from tests.stopped_clock import settle


async def begin(lock: asyncio.Lock, begun: list[int], name: int) -> None:
    """Begin a suspect's probation that lasts until its task is cancelled."""
    async with Probation(lock, 1):
        begun.append(name)
        await asyncio.Event().wait()


async def test_a_request_that_is_no_suspect_waits_for_nobody() -> None:
    lock = asyncio.Lock()
    async with Probation(lock, 1) as suspect, Probation(lock, 0) as other:
        assert suspect.is_on
        assert not other.is_on
        other.gained(5)
        other.end()
        assert suspect.is_on


@pytest.mark.parametrize(("num_deaths", "num_tokens"), [(1, 1), (2, PROBATION_TOKENS_AGAIN)])
async def test_a_suspect_lets_the_next_begin_once_it_has_its_tokens(
    num_deaths: int, num_tokens: int
) -> None:
    lock = asyncio.Lock()
    begun: list[int] = []
    async with Probation(lock, num_deaths) as probation:
        waiting = asyncio.ensure_future(begin(lock, begun, 2))
        for _ in range(num_tokens):
            await settle()
            assert begun == []
            probation.gained(1)
        await settle()
        assert begun == [2]
        assert not probation.is_on
        probation.gained(1)  # its later tokens end nobody's probation
        await settle()
        assert not waiting.done()
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_suspects_begin_in_order_and_end_with_their_blocks() -> None:
    lock = asyncio.Lock()
    begun: list[int] = []
    tasks = [asyncio.ensure_future(begin(lock, begun, name)) for name in range(4)]
    await settle()
    assert begun == [0]
    tasks[2].cancel()  # its client leaves while it waits
    tasks[0].cancel()  # and another one while it is on probation
    await settle()
    assert begun == [0, 1]
    tasks[1].cancel()
    await settle()
    assert begun == [0, 1, 3]
    tasks[3].cancel()
    await asyncio.wait(tasks)
    async with asyncio.timeout(30), Probation(lock, 1) as probation:
        assert probation.is_on
