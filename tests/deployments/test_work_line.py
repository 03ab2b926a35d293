import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from deployments.errors import OverloadedError
from deployments.work_line import WorkLine


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def test_work_is_done_and_its_errors_are_raised(threads: ThreadPoolExecutor) -> None:
    line = WorkLine(threads, 1, 1, "sums")
    assert await line.run(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await line.run(divmod, 7, 0)
    assert await line.run(divmod, 8, 3) == (2, 2)


async def test_who_comes_when_the_line_is_full_is_refused_at_once(
    threads: ThreadPoolExecutor,
) -> None:
    line, gate = WorkLine(threads, 1, 2, "sums"), Event()
    held = [asyncio.ensure_future(line.run(gate.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="sums"):
        await line.run(gate.wait)
    gate.set()
    assert all(await asyncio.gather(*held))
    assert await line.run(gate.wait)


async def test_who_leaves_the_line_makes_room(threads: ThreadPoolExecutor) -> None:
    line, gate = WorkLine(threads, 1, 2, "sums"), Event()
    first, second = (asyncio.ensure_future(line.run(gate.wait)) for _ in range(2))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])
    third = asyncio.ensure_future(line.run(gate.wait))
    gate.set()
    assert all(await asyncio.gather(first, third))


async def test_others_with_the_same_threads_do_not_wait_for_the_line(
    threads: ThreadPoolExecutor,
) -> None:
    line, gate, done = WorkLine(threads, 1, 9, "sums"), Event(), list[str]()

    def work(name: str) -> None:
        gate.wait()
        done.append(name)

    held = [asyncio.ensure_future(line.run(work, name)) for name in ("first", "second")]
    await asyncio.sleep(0)
    other = asyncio.get_running_loop().run_in_executor(threads, work, "other")
    gate.set()
    await asyncio.gather(other, *held)
    assert done == ["first", "other", "second"]
