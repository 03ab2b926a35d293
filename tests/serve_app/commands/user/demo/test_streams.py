from collections.abc import AsyncGenerator
from dataclasses import replace

import pytest

from serve_app.client.chat_client import ChatError, Delta, Notice, Usage
from serve_app.commands.user.demo.streams import (
    BATCH,
    CHAT,
    QUESTIONS,
    UNDER_WAY,
    DemoStream,
    Pause,
    Verdict,
)
from tests.hand_clock import HandClock
from tests.offenders import for_each

Step = float | Delta | Notice


async def read(*steps: Step) -> DemoStream:
    clock = HandClock(50.0)

    async def stream() -> AsyncGenerator[Delta | Notice, None]:
        for step in steps:
            if isinstance(step, float):
                clock.now_s += step
            else:
                yield step

    read_stream = DemoStream(QUESTIONS[0], now_s=clock)
    await read_stream.read(stream())
    return read_stream


def delta(text: str, num_tokens: int, **more: str) -> Delta:
    return Delta("id-1", text, usage=Usage(7, num_tokens), **more)


async def test_a_pause_lasts_from_the_last_token_before_to_the_first_one_after() -> None:
    stream = await read(
        0.1,
        delta("Join ", 1),
        0.5,
        Notice("waiting"),
        1.0,
        Notice("moved"),
        0.25,
        delta("two", 2),
        3.0,
        delta(" paths", 3, finish_reason="stop"),
    )
    assert stream.pauses == [Pause(position=5, num_tokens=1, seconds=1.75)]
    assert (stream.text, stream.num_tokens) == ("Join two paths", 3)
    assert (stream.answer_id, stream.finish_reason) == ("id-1", "stop")
    told = "moved after 1 tokens with a pause of 1.75 s"
    assert stream.summary().endswith(f": id-1, 3 tokens, {told}")


async def test_a_stream_that_is_parked_says_so() -> None:
    stream = await read(
        delta("Join ", 1), 0.5, Notice("parked"), 2.0, Notice("parked"), 1.0, delta("two", 2)
    )
    assert stream.pauses == [Pause(position=5, num_tokens=1, seconds=3.5, notice="parked")]
    assert stream.summary().endswith("parked after 1 tokens with a pause of 3.50 s")


def test_the_chat_of_the_parking_demo_has_the_better_priority() -> None:
    assert (BATCH.body()["priority"], CHAT.body()["priority"]) == (5, 0)


async def test_a_stream_that_does_not_move_has_no_pause() -> None:
    stream = await read(delta("a", 1), 9.0, Notice("waiting"), delta("b", 2))
    assert stream.pauses == []


async def test_a_stream_is_under_way_after_some_tokens() -> None:
    assert not (await read(delta("a", UNDER_WAY - 1))).under_way.is_set()
    assert (await read(delta("a", UNDER_WAY))).under_way.is_set()
    assert (await read(delta("a", 1, finish_reason="stop"))).under_way.is_set()


async def test_an_error_of_the_stream_is_not_swallowed() -> None:
    async def broken() -> AsyncGenerator[Delta | Notice, None]:
        yield delta("a", 1)
        raise ChatError("lost")

    with pytest.raises(ChatError):
        await DemoStream(QUESTIONS[0]).read(broken())


def complete(**changes: object) -> DemoStream:
    stream = DemoStream(QUESTIONS[0], text="Join", usage=Usage(7, 4), finish_reason="stop")
    return replace(stream, **changes)  # type: ignore[arg-type] # fields by name


def moved(**changes: object) -> DemoStream:
    return complete(pauses=[Pause(2, 2, 0.5)], **changes)


def test_equal_streams_of_which_one_has_moved_are_the_proof() -> None:
    verdict = Verdict.of([moved(answer_id="a"), complete()], [complete(answer_id="b"), complete()])
    assert (verdict.is_proof, verdict.text()) == (True, "2 of 2 equal, 0 tokens lost")


@for_each(
    ({"text": "Joim"}, 0),
    ({"usage": Usage(7, 3)}, 1),
    ({"usage": Usage(7, 6)}, 0),
    ({"usage": Usage(8, 4)}, 0),
    ({"usage": None}, 4),
    ({"finish_reason": "length"}, 0),
    ({"finish_reason": None}, 0),
)
def test_any_difference_is_told_and_no_proof(changes: dict[str, object], lost: int) -> None:
    verdict = Verdict.of([moved(), moved(**changes)], [complete(), complete()])
    assert verdict.text() == f"1 of 2 equal, {lost} tokens lost"
    assert not verdict.is_proof


def test_equal_streams_prove_nothing_if_none_has_moved() -> None:
    verdict = Verdict.of([complete()], [complete()])
    assert not verdict.is_proof
    assert verdict.text().startswith("1 of 1 equal, 0 tokens lost; but no stream")
    told = Verdict.of([complete()], [complete()], "the batch was never parked").text()
    assert told.endswith("; but the batch was never parked, so this shows nothing")
