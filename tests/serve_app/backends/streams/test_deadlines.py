import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from deployments.contract.bounded_executor import BoundedExecutor
from deployments.contract.descriptions import PoolerDescription
from deployments.contract.errors import (
    DeadlineExceededError,
    FirstTokenTimeoutError,
    StallTimeoutError,
    TotalTimeoutError,
)
from deployments.contract.generation import GenerationRequest
from deployments.contract.output import TextDelta
from deployments.contract.pooling import PooledText, PoolingRequest
from deployments.contract.sampling_params import SamplingParams
from serve_app.api.chat.schema import ChatRequest
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.open_answer import open_answer
from serve_app.backends.models.catalog import ModelCatalog
from serve_app.backends.replicas.backend import DescribeRequest
from serve_app.backends.streams.deadlines import (
    Deadlines,
    DeadlineStream,
    first_deadline,
    next_deadline,
)
from serve_app.config import AppConfig, LimitsConfig
from serve_app.http.request_id import RequestIdMiddleware
from serve_app.ingress import AppParts, build_app
from serve_app.middleware.access_log import AccessLogMiddleware
from tests.offenders import for_each
from tests.serve_app.apps import client_of, make_app
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fake_pooler import FakeClassifier
from tests.serve_app.fakes import HELLO, FakeBackend, FakeClock, FakeStream, Step
from tests.serve_app.sse_decoder import SseDecoder
from tests.stopped_clock import Clock, settle

SOON_S = 0.01
REQUEST = GenerationRequest("r", "hi", SamplingParams())
TEXTS = PoolingRequest("r", ("hi",))
ENDLESS: list[Step] = [HELLO[0], asyncio.Event()]


def limits(**changes: float | None) -> LimitsConfig:
    never: dict[str, Any] = {
        "first_token_timeout_s": None, "stall_timeout_s": None, "total_timeout_s": None,
    }  # fmt: skip
    return LimitsConfig.model_validate({**never, **changes})


@for_each(
    ({}, float("inf"), FirstTokenTimeoutError),
    ({"first_token_timeout_s": 5}, 105, FirstTokenTimeoutError),
    ({"first_token_timeout_s": 5, "total_timeout_s": 4}, 104, TotalTimeoutError),
    ({"first_token_timeout_s": 5, "total_timeout_s": 6}, 105, FirstTokenTimeoutError),
    ({"stall_timeout_s": 1, "total_timeout_s": 6}, 106, TotalTimeoutError),
)
def test_before_the_first_token_the_earlier_of_two_deadlines_counts(
    changes: dict[str, float], at_s: float, error: type[DeadlineExceededError]
) -> None:
    deadline = first_deadline(limits(**changes), 100)
    assert deadline.at_s == at_s
    assert deadline.error is error


@for_each(
    ({}, float("inf"), StallTimeoutError),
    ({"stall_timeout_s": 5}, 125, StallTimeoutError),
    ({"stall_timeout_s": 5, "total_timeout_s": 24}, 124, TotalTimeoutError),
    ({"stall_timeout_s": 5, "total_timeout_s": 26}, 125, StallTimeoutError),
    ({"first_token_timeout_s": 1}, float("inf"), StallTimeoutError),
)
def test_between_tokens_the_stall_timeout_counts_from_the_last_one(
    changes: dict[str, float], at_s: float, error: type[DeadlineExceededError]
) -> None:
    deadline = next_deadline(limits(**changes), 100, 120)
    assert deadline.at_s == at_s
    assert deadline.error is error


async def read(backend: Deadlines) -> list[list[TextDelta]]:
    async with asyncio.timeout(30):
        return [deltas async for deltas in await backend.send(REQUEST)]


async def test_a_stream_within_its_limits_is_passed_on_completely() -> None:
    backend = FakeBackend()
    in_time = Deadlines(backend, LimitsConfig())
    stream = await in_time.send(REQUEST)
    assert stream.accepted.num_prompt_tokens == 7
    assert [deltas async for deltas in stream] == HELLO
    await stream.aclose()
    assert backend.streams[0].closed.is_set()


@pytest.mark.parametrize(
    ("steps", "changes", "error"),
    [
        ([asyncio.Event()], {"first_token_timeout_s": SOON_S}, FirstTokenTimeoutError),
        ([asyncio.Event()], {"total_timeout_s": SOON_S}, TotalTimeoutError),
        (ENDLESS, {"stall_timeout_s": SOON_S, "first_token_timeout_s": 60}, StallTimeoutError),
        (ENDLESS, {"stall_timeout_s": 60, "total_timeout_s": SOON_S}, TotalTimeoutError),
    ],
)
async def test_a_late_stream_is_aborted_and_its_error_names_the_limit(
    steps: list[Step], changes: dict[str, float], error: type[DeadlineExceededError]
) -> None:
    backend = FakeBackend(steps)
    with pytest.raises(error, match=rf"\(limits\.{error.code}_s\)"):
        await read(Deadlines(backend, limits(**changes)))
    assert backend.streams[0].closed.is_set()


class TirelessStream(FakeStream):
    async def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        while True:
            await asyncio.sleep(0)
            yield [TextDelta((1,), "x")]


async def test_the_total_timeout_ends_a_stream_that_never_stalls() -> None:
    tireless = TirelessStream([], 7)
    started_s = asyncio.get_running_loop().time()
    stream = DeadlineStream(tireless, limits(total_timeout_s=SOON_S, stall_timeout_s=60), started_s)
    async with asyncio.timeout(30):
        with pytest.raises(TotalTimeoutError):
            async for _ in stream:
                pass
    assert tireless.closed.is_set()


async def test_the_reader_s_own_time_is_not_a_stall(advance: Clock) -> None:
    next_token = asyncio.Event()
    backend = FakeBackend([HELLO[0], next_token, *HELLO[1:]])
    in_time = Deadlines(backend, limits(stall_timeout_s=SOON_S))
    stream = aiter(await in_time.send(REQUEST))
    await anext(stream)
    advance(2 * SOON_S)
    reading = asyncio.ensure_future(anext(stream))
    await settle()
    assert not reading.done(), "its limit counts from now"
    next_token.set()
    assert [await reading, *[deltas async for deltas in stream]] == HELLO[1:]


async def test_the_stall_limit_counts_from_the_end_of_a_wait_for_another_replica(
    advance: Clock,
) -> None:
    backend = FakeBackend(ENDLESS)
    moving, started_s = await backend.send(REQUEST), asyncio.get_running_loop().time()
    stream = DeadlineStream(moving, limits(stall_timeout_s=10, total_timeout_s=600), started_s)
    await anext(stream)
    reading = asyncio.ensure_future(anext(stream))
    await settle()
    for _ in range(5):
        advance(9)
        moving.waited_until_s = asyncio.get_running_loop().time()
        await settle()
    advance(9)
    await settle()
    assert not reading.done()
    advance(2)
    with pytest.raises(StallTimeoutError):
        await reading


async def test_a_timeout_error_of_the_replica_is_not_a_deadline() -> None:
    backend = FakeBackend([HELLO[0], TimeoutError("theirs")])
    with pytest.raises(TimeoutError, match="theirs"):
        await read(Deadlines(backend, LimitsConfig()))


async def test_a_model_that_loads_for_too_long_is_late() -> None:
    backend = FakeBackend()
    backend.loaded = asyncio.Event()
    in_time = Deadlines(backend, limits(first_token_timeout_s=SOON_S))
    with pytest.raises(FirstTokenTimeoutError):
        await in_time.send(DescribeRequest())
    backend.loaded.set()
    assert await in_time.send(DescribeRequest()) == backend.description


async def test_deadlines_count_from_the_request_s_arrival() -> None:
    in_time = Deadlines(FakeBackend([asyncio.Event()]), limits(first_token_timeout_s=60))
    moments_s = iter([0.0, 100.0, 200.0])

    async def surface(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(FirstTokenTimeoutError):
            await read(in_time)

    app = AccessLogMiddleware(surface, now=lambda: next(moments_s, 300.0))
    async with AsgiCall(RequestIdMiddleware(app), "/", None) as call:
        await call.end()


async def test_slow_images_exceed_the_first_token_timeout() -> None:
    class Silent:
        async def fetch_all(self, urls: Mapping[str, str]) -> dict[str, bytes]:
            await asyncio.Event().wait()
            raise AssertionError("the event is never set")

    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    backend = FakeBackend()
    late = make_app(backend, limits={"first_token_timeout_s": SOON_S}, images=Silent())
    answer = await post(
        late, "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [image]}]}
    )
    assert answer.json()["error"]["code"] == "first_token_timeout"
    assert backend.num_calls == 0


async def test_a_schema_queued_for_too_long_exceeds_the_first_token_timeout() -> None:
    backend, began, may_end = FakeBackend(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def block_the_executor() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()

    with ThreadPoolExecutor(1) as threads:
        schemas = BoundedExecutor(threads, 1, 8, "JSON schemas")
        held = asyncio.ensure_future(schemas.run(block_the_executor))
        await began.wait()
        context = ApiContext(
            ModelCatalog({"m": backend}), limits(first_token_timeout_s=SOON_S), FakeClock(),
            schemas=schemas,
        )  # fmt: skip
        body = ChatRequest.model_validate({**CHAT, "response_format": {"type": "json_object"}})
        try:
            with pytest.raises(FirstTokenTimeoutError):
                await open_answer(context, body, "r")
        finally:
            may_end.set()
            await held
    assert backend.num_calls == 0


async def test_a_late_classification_is_an_error_and_its_call_is_cancelled() -> None:
    slow = FakeClassifier()
    slow.answers = asyncio.Event()
    with pytest.raises(TotalTimeoutError, match=r"0\.01 s \(limits\.total_timeout_s\)"):
        await Deadlines(slow, limits(total_timeout_s=0.01), generates=False).send(TEXTS)
    assert slow.is_cancelled


async def test_the_deadline_of_a_classification_counts_from_the_arrival() -> None:
    slow = FakeClassifier()
    slow.answers = asyncio.Event()
    moments_s = iter([0.0, 100.0])

    async def surface(scope: Scope, receive: Receive, send: Send) -> None:
        async with asyncio.timeout(20):
            with pytest.raises(TotalTimeoutError):
                await Deadlines(slow, limits(total_timeout_s=60), generates=False).send(TEXTS)

    app = AccessLogMiddleware(surface, now=lambda: next(moments_s, 100.0))
    async with AsgiCall(RequestIdMiddleware(app), "/", None) as call:
        await call.end()


async def test_a_classifier_that_loads_for_too_long_is_late() -> None:
    slow = FakeClassifier()
    slow.loaded = asyncio.Event()
    with pytest.raises(TotalTimeoutError, match="not loaded"):
        await Deadlines(slow, limits(total_timeout_s=0.01), generates=False).send(DescribeRequest())


@pytest.mark.parametrize("total_timeout_s", [None, 600])
async def test_a_classification_that_comes_in_time_is_passed_on(
    total_timeout_s: float | None,
) -> None:
    model, in_time = (
        FakeClassifier(),
        Deadlines(FakeClassifier(), limits(total_timeout_s=total_timeout_s), generates=False),
    )
    assert await in_time.send(TEXTS) == await model.send(TEXTS)
    assert await in_time.send(DescribeRequest()) == model.description


async def test_a_timeout_inside_a_classifier_is_not_taken_for_the_deadline() -> None:
    class Failing(FakeClassifier):
        async def pool(self, request: PoolingRequest) -> tuple[PooledText, ...]:
            raise TimeoutError("its own")

        async def describe(self) -> PoolerDescription:
            raise TimeoutError("its own")

    in_time = Deadlines(Failing(), limits(total_timeout_s=600), generates=False)
    with pytest.raises(TimeoutError, match="its own"):
        await in_time.send(TEXTS)
    with pytest.raises(TimeoutError, match="its own"):
        await in_time.send(DescribeRequest())


def app(backend: FakeBackend, **changes: float | None) -> FastAPI:
    config = AppConfig.model_validate(
        {"models": [{"id": "m", "source": "nowhere"}], "limits": limits(**changes).model_dump()}
    )
    return build_app(AppParts(config, {"m": backend}, clock=FakeClock()))


async def post(app: FastAPI, path: str, body: dict[str, Any]) -> httpx.Response:
    async with client_of(app) as client:
        return await client.post(path, json=body)


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SURFACES = [("/v1/chat/completions", CHAT), ("/text-generation", {"prompt": "hi"})]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "body"), SURFACES)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("code", ["first_token_timeout", "stall_timeout", "total_timeout"])
async def test_a_late_unstreamed_answer_is_a_504_that_should_not_be_retried(
    path: str, body: dict[str, Any], n: int, code: str
) -> None:
    steps = [asyncio.Event()] if code == "first_token_timeout" else ENDLESS
    backend = FakeBackend(steps)
    several = {"n": n} if body is CHAT else {}
    answer = await post(
        app(backend, **{f"{code}_s": SOON_S}), path, {**body, **several, "stream": False}
    )
    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (code, "timeout_error")
    assert f"{code}_s" in error["message"]
    assert all(stream.closed.is_set() for stream in backend.streams)


@pytest.mark.parametrize(("path", "body"), SURFACES)
@pytest.mark.parametrize("code", ["first_token_timeout", "stall_timeout", "total_timeout"])
async def test_a_late_stream_ends_with_an_error_event_and_without_done(
    path: str, body: dict[str, Any], code: str
) -> None:
    steps = [asyncio.Event()] if code == "first_token_timeout" else ENDLESS
    backend = FakeBackend(steps)
    answer = await post(app(backend, **{f"{code}_s": SOON_S}), path, {**body, "stream": True})
    assert answer.status_code == 200
    events = SseDecoder().feed(answer.content)
    assert f'"code":"{code}"' in events[-1]
    assert "[DONE]" not in events
    assert all(stream.closed.is_set() for stream in backend.streams)


async def test_a_replica_that_does_not_accept_in_time_is_a_504_for_a_stream_too() -> None:
    class Silent(FakeBackend):
        async def generate(self, request: GenerationRequest) -> Any:
            await asyncio.Event().wait()

    answer = await post(
        app(Silent(), first_token_timeout_s=SOON_S), "/text-generation", {"prompt": "hi"}
    )
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "first_token_timeout"
