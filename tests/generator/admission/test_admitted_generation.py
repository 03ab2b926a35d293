"""The limits of admission on a replica with a real engine."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from threading import Semaphore
from typing import Any

import pytest

from deployments.contract.errors import InvalidRequestError, RaystreamError
from deployments.contract.generation import (
    Accepted,
    GenerationEvent,
    GenerationRequest,
    Refused,
    RequestGroup,
    StreamKey,
)
from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import CpuDevice
from deployments.generator.prompt_encoder import EncodedPrompt
from deployments.plan.kv_layout import BLOCK_SIZE
from deployments.text_generator import TextGenerator
from tests.deployments.local_handle import local_backend, read
from tests.deployments.tiny_folder import save_text_model, spec
from tests.serve_app.read_stream import read_to_end

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
REQUEST = GenerationRequest("r", "hello", ENDLESS)

Stream = AsyncIterator[list[GenerationEvent]]


def with_setters(method: Any) -> Any:
    """Give a method the setters of `@serve.batch` that `reconfigure` calls; they do nothing."""
    method.set_max_batch_size = method.set_batch_wait_timeout_s = lambda _: None
    return method


class Replica(TextGenerator):
    """Encodes each request by itself, and takes requests that no ingress has sent.

    The queue of `@serve.batch` belongs to one event loop per process, here another module's.
    """

    num_encoded = 0
    numbers = count()

    def generate(self, request: GenerationRequest) -> Stream:
        key = request.stream or StreamKey("nobody", next(self.numbers))
        return super().generate(replace(request, stream=key))

    @with_setters
    async def _encode(self, request: GenerationRequest) -> EncodedPrompt | RaystreamError:
        self.num_encoded += 1
        await asyncio.sleep(0)
        return self._encoder.encode([request])[0]


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """Return a replica that runs two sequences at once and lets three wait."""
    folder = save_text_model(tmp_path_factory.mktemp("qwen2"))
    made = Replica(spec(folder, max_num_seqs=2, max_model_len=4096, max_queued_requests=3))
    yield made
    made.__del__()


async def open_streams(generator: Replica, num: int) -> tuple[list[Stream], list[Refused]]:
    """Open streams at the same time; return the accepted ones and the refusals."""
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


async def test_of_many_requests_at_once_exactly_those_beyond_the_limits_are_refused(
    generator: Replica,
) -> None:
    accepted, refused = await open_streams(generator, 40)
    assert (len(accepted), len(refused)) == (5, 35)
    assert all((event.error.retry_after_s or 0) >= 1 for event in refused)
    assert {event.replica_id for event in refused} == {generator._replica_id}
    assert all(event.is_full for event in refused)
    await close(accepted)
    assert is_empty(generator)


async def test_a_refused_request_is_not_tokenized(generator: Replica) -> None:
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


async def test_each_waiting_request_gets_its_whole_answer(generator: Replica) -> None:
    request = replace(REQUEST, sampling=SamplingParams(max_tokens=20, ignore_eos=True))

    answers = await asyncio.gather(*(read(generator, request) for _ in range(5)))
    assert [sum(len(delta.token_ids) for delta in answer) for answer in answers] == [20] * 5
    assert is_empty(generator)


async def test_an_invalid_request_returns_its_permit(generator: Replica) -> None:
    [refusal] = await anext(generator.generate(replace(REQUEST, prompt=(10**6,))))
    assert isinstance(refusal, Refused)
    assert isinstance(refusal.error, InvalidRequestError)
    assert is_empty(generator)


async def test_waiting_tokens_include_those_that_may_be_generated(generator: Replica) -> None:
    generator.reconfigure({"max_queued_tokens": 4096 + 25})
    accepted, refused = await open_streams(generator, 4)
    assert (len(accepted), len(refused)) == (3, 1)
    assert "4096 tokens wait" in str(refused[0].error)
    assert not refused[0].is_full, "a shorter one would be admitted"
    short = [replace(REQUEST, sampling=SamplingParams(max_tokens=n)) for n in (21, 20, 1)]
    streams = [generator.generate(request) for request in short]
    firsts = [(await anext(stream))[0] for stream in streams]
    assert [type(event) for event in firsts] == [Refused, Accepted, Refused]
    await close([*streams, *accepted])
    generator.reconfigure({})
    assert is_empty(generator)


async def test_a_length_that_is_lowered_ends_the_answer_and_counts_as_what_is_left(
    generator: Replica,
) -> None:
    sampling = SamplingParams(max_tokens=10**6, ignore_eos=True)
    long = replace(REQUEST, prompt=(60,) * 4090, sampling=sampling)
    accepted, _ = await open_streams(generator, 2)
    backend = local_backend(generator)
    async with aclosing(backend):
        waiting = await backend.send(long)
        assert generator._admission.num_waiting_tokens == 4096
        await close(accepted)
        text = await read_to_end(waiting)
    assert (len(text.token_ids), text.finish_reason) == (6, FinishReason.LENGTH)
    assert is_empty(generator)


async def test_a_full_replica_accepts_what_another_has_admitted(generator: Replica) -> None:
    accepted, _ = await open_streams(generator, 5)
    resumed = generator.generate(replace(REQUEST, is_resumed=True, generated_token_ids=(60,)))
    assert isinstance((await anext(resumed))[0], Accepted)
    await close([*accepted, resumed])
    assert is_empty(generator)


async def test_a_group_is_accepted_as_a_whole_or_not_at_all(generator: Replica) -> None:
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


async def test_pings_need_no_permit(generator: Replica) -> None:
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


class SmallDevice(CpuDevice):
    """Memory for a few sequences of full length."""

    @property
    def total_bytes(self) -> int:
        return 6 * 2**20


async def test_as_many_run_as_their_tokens_fit_into_the_memory(
    generator: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Replica(
        spec(generator._spec.source, max_num_seqs=8, max_model_len=4096, max_queued_requests=1),
        lambda _: SmallDevice(),
    )
    engine = small._engine._placed.engine
    steps, run_step = Semaphore(0), engine.step
    monkeypatch.setattr(engine, "step", lambda: steps.acquire() and run_step())
    num_warm = engine.stats.num_steps
    [num_blocks] = small._facts.layout.num_blocks
    num_that_fit = num_blocks // (3840 // BLOCK_SIZE)
    assert 1 <= num_that_fit < 8
    long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=3800)
    streams = [small.generate(replace(REQUEST, sampling=long)) for _ in range(num_that_fit + 2)]
    try:
        events = [(await anext(stream))[0] for stream in streams]
        assert [type(event) for event in events] == [*[Accepted] * (num_that_fit + 1), Refused]
        assert small._admission.num_running == num_that_fit
        steps.release(2)  # the first may have begun before the other sequences came
        async with asyncio.timeout(30):
            while small._engine.stats.num_steps < num_warm + 2:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0)
        stats = small._engine.stats
        assert (stats.num_running, stats.num_waiting) == (num_that_fit, 1)
        assert stats.kv_usage > 0.5
    finally:
        steps.release(10_000)
        await close(streams)
        small.__del__()
    assert is_empty(small)
