from collections.abc import AsyncGenerator

import pytest

from serve_app.client.chat_client import ChatError, Delta, Notice, Usage
from serve_app.commands.user.chat.answer import Answer
from tests.hand_clock import HandClock


class Noted:
    """A screen that notes what it is given."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def add(self, text: str, *, is_reasoning: bool) -> None:
        self.shown.append(f"({text})" if is_reasoning else text)

    def notice(self, text: str) -> None:
        self.shown.append(f"[{text}]")


async def stream(
    clock: HandClock, *steps: float | Delta | Notice | ChatError
) -> AsyncGenerator[Delta | Notice, None]:
    for step in steps:
        if isinstance(step, float):
            clock.now_s += step
        elif isinstance(step, ChatError):
            raise step
        else:
            yield step


async def answer_of(*steps: float | Delta | Notice | ChatError) -> tuple[Answer, Noted]:
    clock, screen = HandClock(100.0), Noted()
    answer = Answer(now_s=clock)
    try:
        await answer.read(stream(clock, *steps), screen)
    except ChatError as error:
        screen.shown.append(str(error))
    return answer, screen


async def test_text_reasoning_and_notices_are_shown_in_order() -> None:
    answer, screen = await answer_of(
        Notice("loading m (2 s)"), Delta("1", "a", "hm"), Notice("moved"), Delta("1", "b")
    )
    assert screen.shown == ["[loading m (2 s)]", "(hm)", "a", "[moved]", "b"]
    assert (answer.text, answer.num_moves) == ("ab", 1)


async def test_its_figures_are_those_of_its_tokens() -> None:
    answer, _ = await answer_of(
        0.25,
        Delta("1", "a"),
        2.0,
        Delta("1", "b"),
        Delta("1", finish_reason="length"),
        1.0,
        Delta("1", usage=Usage(5, 21)),
    )
    assert answer.figures() == (
        "first token after 250 ms, 21 tokens at 10 a second, cut by its length limit"
    )


async def test_what_the_server_does_not_count_is_not_told() -> None:
    answer, _ = await answer_of(0.5, Delta("1", "a"), Notice("moved"), Notice("moved"))
    assert answer.figures() == "first token after 500 ms, moved to another replica 2 times"
    together, _ = await answer_of(0.5, Delta("1", "ab", usage=Usage(5, 2)))
    assert together.figures() == "first token after 500 ms, 2 tokens"


async def test_a_speed_of_no_time_or_of_no_tokens_is_not_told() -> None:
    quick, _ = await answer_of(0.5, Delta("1", "a"), 0.01, Delta("1", "b", usage=Usage(5, 11)))
    assert quick.figures() == "first token after 500 ms, 11 tokens"
    first = Delta("1", "a", usage=Usage(5, 11))
    at_once, _ = await answer_of(0.5, first, 2.0, Delta("1", " "), Delta("1", usage=Usage(5, 11)))
    assert at_once.figures() == "first token after 500 ms, 11 tokens"


@pytest.mark.parametrize("num", [0, 1])
async def test_what_has_come_before_an_error_stays(num: int) -> None:
    answer, screen = await answer_of(*[Delta("1", "a")] * num, ChatError("lost"))
    assert screen.shown[-1] == "lost"
    assert answer.text == "a" * num
    assert bool(answer.figures()) == bool(num)
