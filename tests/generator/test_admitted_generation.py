"""The limits of admission, as a replica with a real engine holds them."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest

from deployments.contract import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    Refused,
    RequestGroup,
    SamplingParams,
)
from deployments.errors import InvalidRequestError, RaystreamError
from deployments.prompt_encoder import EncodedPrompt
from deployments.text_generator import TextGenerator
from tests.deployments.tiny_folder import save_text_model, spec

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
REQUEST = GenerationRequest("r", "hello", ENDLESS)

Stream = AsyncIterator[list[GenerationEvent]]


def with_setters(method: Any) -> Any:
    """Give a method what `reconfigure` sets on one of `@serve.batch`; here it means nothing."""
    method.set_max_batch_size = method.set_batch_wait_timeout_s = lambda _: None
    return method


class Replica(TextGenerator):
    """Encodes each request by itself.

    The queue of `@serve.batch` belongs to one event loop of the process: another test module's.
    """

    num_encoded = 0

    @with_setters
    async def _encode(self, request: GenerationRequest) -> EncodedPrompt | RaystreamError:
        self.num_encoded += 1
        await asyncio.sleep(0)
        return self._encoder.encode([request])[0]


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Return a replica of two slots and three places behind them."""
    folder = save_text_model(tmp_path_factory.mktemp("qwen2"))
    made = Replica(spec(folder, max_num_seqs=2, max_model_len=4096, max_queued_requests=3))
    yield made
    made.__del__()


async def open_streams(generator: Replica, num: int) -> tuple[list[Stream], list[Refused]]:
    """Open streams all at once; return those that were accepted, and the refusals."""
    streams = [generator.generate(REQUEST) for _ in range(num)]
    firsts = await asyncio.gather(*map(anext, streams))
    accepted = [
        s for s, [event] in zip(streams, firsts, strict=True) if isinstance(event, Accepted)
    ]
    return accepted, [event for [event] in firsts if isinstance(event, Refused)]


async def close(streams: list[Stream]) -> None:
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined] # it is a generator


def is_empty(generator: Replica) -> bool:
    counted = generator._admission
    return (counted.num_running, counted.num_waiting, counted.num_waiting_tokens) == (0, 0, 0)


async def test_of_many_at_once_exactly_those_beyond_the_limits_are_refused(
    generator: Replica,
) -> None:
    accepted, refused = await open_streams(generator, 40)
    assert (len(accepted), len(refused)) == (5, 35)
    assert all(event.retry_after_s >= 1 for event in refused)
    assert {event.replica_id for event in refused} == {generator._replica_id}
    assert all(event.is_full for event in refused)
    await close(accepted)
    assert is_empty(generator)


async def test_what_was_refused_is_not_tokenized(generator: Replica) -> None:
    accepted, _ = await open_streams(generator, 5)
    num_encoded = generator.num_encoded
    assert isinstance((await anext(generator.generate(REQUEST)))[0], Refused)
    assert generator.num_encoded == num_encoded
    await close(accepted)


async def test_a_refusal_ends_the_stream(generator: Replica) -> None:
    accepted, _ = await open_streams(generator, 5)
    messages = [message async for message in generator.generate(REQUEST)]
    assert len(messages) == 1
    await close(accepted)


async def test_each_that_waits_gets_its_whole_answer(generator: Replica) -> None:
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=20, ignore_eos=True))

    async def read(request: GenerationRequest) -> int:
        events = [event async for message in generator.generate(request) for event in message]
        return sum(len(getattr(event, "token_ids", ())) for event in events)

    assert await asyncio.gather(*(read(request) for _ in range(5))) == [20] * 5
    assert is_empty(generator)


async def test_a_request_that_is_invalid_gives_its_permit_back(generator: Replica) -> None:
    with pytest.raises(InvalidRequestError):
        await anext(generator.generate(replace(REQUEST, prompt=(10**6,))))
    assert is_empty(generator)


async def test_tokens_that_wait_are_counted_with_what_they_may_generate(
    generator: Replica,
) -> None:
    generator.reconfigure({"max_queued_tokens": 4096 + 25})
    accepted, refused = await open_streams(generator, 4)
    assert (len(accepted), len(refused)) == (3, 1)
    assert "4096 tokens wait" in refused[0].message
    assert not refused[0].is_full, "a shorter one would be admitted"
    short = [replace(REQUEST, sampling=SamplingParams(max_tokens=n)) for n in (21, 20, 1)]
    streams = [generator.generate(request) for request in short]
    firsts = [(await anext(stream))[0] for stream in streams]
    assert [type(event) for event in firsts] == [Refused, Accepted, Refused]
    await close([*streams, *accepted])
    generator.reconfigure({})
    assert is_empty(generator)


async def test_what_another_replica_has_admitted_is_taken_by_a_full_one(
    generator: Replica,
) -> None:
    accepted, _ = await open_streams(generator, 5)
    resumed = generator.generate(replace(REQUEST, generated_token_ids=(60,)))
    assert isinstance((await anext(resumed))[0], Accepted)
    await close([*accepted, resumed])
    assert is_empty(generator)


async def test_a_group_is_taken_whole_or_not_at_all(generator: Replica) -> None:
    first = replace(REQUEST, group=RequestGroup("g", 3, is_first=True))
    other = replace(REQUEST, group=RequestGroup("g", 3, is_first=False))
    accepted, _ = await open_streams(generator, 3)
    [refusal] = await anext(generator.generate(first))
    assert isinstance(refusal, Refused)
    assert not refusal.is_full, "a smaller one would be admitted"
    await close(accepted[:1])
    group = [generator.generate(request) for request in (first, other, other)]
    assert [type((await anext(stream))[0]) for stream in group] == [Accepted] * 3
    assert isinstance((await anext(generator.generate(REQUEST)))[0], Refused)
    await close([*group, *accepted[1:]])
    assert is_empty(generator)


async def test_pings_need_no_room(generator: Replica) -> None:
    accepted, _ = await open_streams(generator, 5)
    async with asyncio.timeout(10):
        await generator.ping()
    await close(accepted)


async def test_the_limits_change_while_the_replica_runs(generator: Replica) -> None:
    generator.reconfigure({"max_queued_requests": 1})
    accepted, _ = await open_streams(generator, 9)
    assert len(accepted) == 3
    generator.reconfigure({"max_queued_requests": None})
    more, _ = await open_streams(generator, 9)
    assert len(more) == 2
    await close([*accepted, *more])
