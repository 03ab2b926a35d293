import asyncio
from collections.abc import Awaitable, Callable, Iterable

import pytest

from serve_app.opening_line import FullError, OpeningLine


class Asked:
    """Requests that have asked; each waits for its answer."""

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
        self._answers[name].set_exception(FullError("full", 3, "a"))

    def fail(self, name: int) -> None:
        self._answers[name].set_exception(ValueError("broken"))


class Line:
    """A line in which two may ask at once."""

    def __init__(self) -> None:
        self.asked = Asked()
        self.tasks: dict[int, asyncio.Task[str]] = {}
        self._line = OpeningLine(max_num_asking=2)

    async def come(self, names: Iterable[int]) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._line.run(self.asked.asker(name)))
        await settle()

    def refused(self) -> list[int]:
        return [
            name
            for name, task in self.tasks.items()
            if task.done() and not task.cancelled() and isinstance(task.exception(), FullError)
        ]


async def settle() -> None:
    """Let every task run until it waits for what only the test can bring."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_so_many_ask_at_once_and_the_others_in_their_order() -> None:
    line = Line()
    await line.come(range(5))
    assert line.asked.names == [0, 1]
    line.asked.take(1)
    await settle()
    assert line.asked.names == [0, 1, 2]
    line.asked.fail(0)
    await settle()
    assert line.asked.names == [0, 1, 2, 3]
    assert await line.tasks[1] == "taken 1"
    with pytest.raises(ValueError, match="broken"):
        await line.tasks[0]
    for name in (2, 3):
        line.asked.take(name)
    await settle()
    line.asked.take(4)
    assert await line.tasks[4] == "taken 4"


async def test_a_refusal_speaks_for_those_who_stood_in_line_when_it_was_asked_for() -> None:
    line = Line()
    await line.come(range(2))
    await line.come(range(2, 6))
    line.asked.take(0)
    await settle()
    assert line.asked.names == [0, 1, 2]
    await line.come(range(6, 8))
    line.asked.refuse(2)
    await settle()
    assert line.refused() == [2, 3, 4, 5]
    assert line.asked.names == [0, 1, 2, 6], "who came after the question asks himself"
    refusals = [line.tasks[name].exception() for name in (2, 3)]
    assert refusals[0] is not refusals[1]
    assert all(isinstance(r, FullError) and r.retry_after_s == 3 for r in refusals)
    line.asked.take(1)
    await settle()
    for name in (6, 7):
        line.asked.take(name)
    assert await line.tasks[7] == "taken 7"


async def test_a_refusal_that_was_asked_for_before_they_came_is_none_of_theirs() -> None:
    line = Line()
    await line.come(range(2))
    await line.come(range(2, 4))
    line.asked.refuse(0)
    await settle()
    assert line.refused() == [0]
    assert line.asked.names == [0, 1, 2]
    line.asked.take(1)
    await settle()
    assert line.asked.names == [0, 1, 2, 3]
    for name in (2, 3):
        line.asked.take(name)
    assert await line.tasks[3] == "taken 3"


async def test_who_leaves_the_line_holds_nobody_up() -> None:
    line = Line()
    await line.come(range(6))
    line.tasks[3].cancel()
    line.asked.take(0)
    await settle()
    line.asked.refuse(2)
    await settle()
    assert line.refused() == [2, 4, 5]
    line.asked.take(1)
    await line.come([6, 7])
    assert line.asked.names == [0, 1, 2, 6, 7]


async def test_who_leaves_just_when_it_is_his_turn_passes_it_on() -> None:
    line = Line()
    await line.come(range(4))
    line.asked.take(0)
    await asyncio.sleep(0)
    assert line.tasks[0].done()
    line.tasks[2].cancel()
    await settle()
    assert line.tasks[2].cancelled()
    assert line.asked.names == [0, 1, 3]


async def test_who_leaves_while_he_asks_passes_his_turn_on() -> None:
    line = Line()
    await line.come(range(3))
    line.tasks[0].cancel()
    await settle()
    assert line.asked.names == [0, 1, 2]
