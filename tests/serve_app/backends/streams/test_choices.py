import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from deployments.contract.errors import OverloadedError, ReplicaUnavailableError
from deployments.contract.generation import GenerationRequest, GenerationStream
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from serve_app.backends.streams.choices import Choices
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from tests.serve_app.fakes import HELLO, FakeBackend, FakeStream, Step

END: list[Step] = [[TextDelta((9,), "b", FinishReason.LENGTH)]]


async def test_deltas_come_as_they_are_ready_with_their_answers_index() -> None:
    release = asyncio.Event()
    streams = [FakeStream([release, *HELLO], 7), FakeStream([[TextDelta((8,), "a")], *END], 7)]
    found: list[tuple[int, str]] = []
    async with asyncio.timeout(30), aclosing(Choices(streams).deltas()) as deltas:
        async for index, delta in deltas:
            found.append((index, delta.text))
            if delta.finish_reason is FinishReason.LENGTH:
                release.set()
    assert found == [(1, "a"), (1, "b"), (0, "Hello"), (0, ", world"), (0, "!")]


async def test_answers_read_to_their_ends_come_in_order_and_are_closed() -> None:
    streams = [FakeStream(HELLO, 7), FakeStream(END, 7)]
    choices = Choices(streams)
    assert await choices.read_to_end() == [
        TextDelta((11, 12, 13, 14, 15), "Hello, world!", FinishReason.STOP),
        TextDelta((9,), "b", FinishReason.LENGTH),
    ]
    assert (len(choices), choices.num_prompt_tokens) == (2, 7)
    assert all(stream.closed.is_set() for stream in streams)


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_one_broken_answer_fails_all_and_closes_them(failing: int) -> None:
    never = asyncio.Event()
    streams = [FakeStream([HELLO[0], never], 7) for _ in range(3)]
    streams[failing] = FakeStream([HELLO[0], ReplicaUnavailableError("gone")], 7)
    async with asyncio.timeout(30):
        with pytest.raises(ReplicaUnavailableError, match="gone"):
            await Choices(streams).read_to_end()
    assert all(stream.closed.is_set() for stream in streams)


@pytest.mark.parametrize("num_steps", [0, 1])
async def test_a_text_that_ends_without_a_finish_is_an_error(num_steps: int) -> None:
    record = RequestRecord("r", "POST", lambda: 0.0, 0.0)
    token = CURRENT_RECORD.set(record)
    try:
        with pytest.raises(ReplicaUnavailableError, match="before it was finished"):
            await Choices([FakeStream(HELLO[:num_steps], 7)]).read_to_end()
    finally:
        CURRENT_RECORD.reset(token)
    assert record.error_code == "replica_unavailable"


async def test_answers_that_break_together_raise_one_error() -> None:
    streams = [FakeStream([ReplicaUnavailableError("gone")], 7) for _ in range(3)]
    with pytest.raises(ReplicaUnavailableError):
        await Choices(streams).read_to_end()


async def test_a_reader_that_stops_early_leaves_no_task_behind() -> None:
    before = asyncio.all_tasks()
    streams = [FakeStream([HELLO[0], asyncio.Event()], 7) for _ in range(3)]
    async with aclosing(Choices(streams).deltas()) as deltas:
        await anext(deltas)
    assert asyncio.all_tasks() == before


def openings(backend: FakeBackend, num: int) -> list[Coroutine[Any, Any, GenerationStream]]:
    request = GenerationRequest("r", "hi", SamplingParams())
    return [backend.send(request) for _ in range(num)]


@pytest.mark.parametrize("refused", [0, 1, 2])
async def test_if_one_answer_is_refused_none_stays_open(refused: int) -> None:
    backend = FakeBackend()
    backend.scripts = [HELLO, HELLO, HELLO]
    backend.scripts[refused] = OverloadedError("busy")
    with pytest.raises(OverloadedError):
        await Choices.open(openings(backend, 3))
    assert len(backend.streams) == 2
    assert all(stream.closed.is_set() for stream in backend.streams)


async def test_a_caller_that_gives_up_while_answers_are_opened_leaves_none_open() -> None:
    backend, opened, never = FakeBackend(), asyncio.Event(), asyncio.Event()

    async def slow() -> GenerationStream:
        opened.set()
        await never.wait()
        raise AssertionError("the event is never set")

    task = asyncio.ensure_future(Choices.open([*openings(backend, 2), slow()]))
    async with asyncio.timeout(30):
        await opened.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert all(stream.closed.is_set() for stream in backend.streams)


REQUESTS = [GenerationRequest(f"r{i}", "hi", SamplingParams()) for i in range(3)]


async def test_a_single_request_is_not_a_group() -> None:
    backend = FakeBackend()
    choices = await Choices.of(backend, REQUESTS[:1])
    assert (len(choices), backend.requests) == (1, REQUESTS[:1])


async def test_the_first_of_several_asks_for_all() -> None:
    backend = FakeBackend()
    for _ in range(2):
        assert len(await Choices.of(backend, REQUESTS)) == 3
    groups = [request.group for request in backend.requests]
    assert [group and (group.size, group.is_first) for group in groups] == [
        (3, True), (3, False), (3, False),
    ] * 2  # fmt: skip
    assert len({group.id for group in groups[:3] if group}) == 1
    assert len({group.id for group in groups if group}) == 2


async def test_if_the_first_is_refused_the_others_are_not_sent() -> None:
    backend = FakeBackend()
    backend.refusal = OverloadedError("busy")
    with pytest.raises(OverloadedError):
        await Choices.of(backend, REQUESTS)
    assert len(backend.requests) == 1


@pytest.mark.parametrize("failing", [1, 2])
async def test_if_a_later_one_fails_the_first_is_closed_too(failing: int) -> None:
    backend = FakeBackend()
    backend.scripts = [HELLO, HELLO, HELLO]
    backend.scripts[failing] = ReplicaUnavailableError("gone")
    with pytest.raises(ReplicaUnavailableError):
        await Choices.of(backend, REQUESTS)
    assert [stream.closed.is_set() for stream in backend.streams] == [True, True]


async def test_a_caller_cancelled_as_the_first_is_accepted_leaves_it_closed() -> None:
    class Leaving(FakeBackend):
        async def generate(self, request: GenerationRequest) -> FakeStream:
            stream = await super().generate(request)
            if len(self.requests) == 1:
                # Runs before any of the tasks that open the other streams.
                asyncio.get_running_loop().call_soon(task.cancel)
            return stream

    backend = Leaving()
    task = asyncio.ensure_future(Choices.of(backend, REQUESTS))
    async with asyncio.timeout(30):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert backend.streams
    assert all(stream.closed.is_set() for stream in backend.streams)
