import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from deployments.contract.bounded_executor import BoundedExecutor
from deployments.contract.errors import OverloadedError
from tests.stopped_clock import settle


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def test_work_returns_its_result_or_raises_its_error(threads: ThreadPoolExecutor) -> None:
    executor = BoundedExecutor(threads, 1, 1, "sums")
    assert await executor.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await executor.run(divmod, 7, 0)
    assert await executor.run(divmod, 8, 3) == (2, 2)


async def test_a_call_beyond_the_bound_is_refused_at_once(threads: ThreadPoolExecutor) -> None:
    executor, gate = BoundedExecutor(threads, 1, 2, "sums"), Event()
    held = [asyncio.ensure_future(executor.run(gate.wait)) for _ in range(2)]
    await settle()
    with pytest.raises(OverloadedError, match="sums"):
        await executor.run(gate.wait)
    gate.set()
    assert all(await asyncio.gather(*held))
    assert await executor.run(gate.wait)


async def test_a_cancelled_call_makes_room(threads: ThreadPoolExecutor) -> None:
    executor, gate = BoundedExecutor(threads, 1, 2, "sums"), Event()
    first, second = (asyncio.ensure_future(executor.run(gate.wait)) for _ in range(2))
    await settle()
    second.cancel()
    await asyncio.wait([second])
    third = asyncio.ensure_future(executor.run(gate.wait))
    gate.set()
    assert all(await asyncio.gather(first, third))


async def test_other_users_of_the_threads_do_not_wait_for_the_queue(
    threads: ThreadPoolExecutor,
) -> None:
    executor, gate, done = BoundedExecutor(threads, 1, 9, "sums"), Event(), list[str]()

    def work(name: str) -> None:
        gate.wait()
        done.append(name)

    held = [asyncio.ensure_future(executor.run(work, name)) for name in ("first", "second")]
    await settle()
    other = asyncio.get_running_loop().run_in_executor(threads, work, "other")
    gate.set()
    await asyncio.gather(other, *held)
    assert done == ["first", "other", "second"]
