"""`Model` over fake replicas, and over two real ones that are lost under its streams."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.contract.errors import (
    FirstTokenTimeoutError,
    GenerationFailedError,
    InvalidRequestError,
    OverloadedError,
    WrongTaskError,
)
from deployments.contract.output import FinishReason, TextDelta
from raystream.model import Delta, Model
from serve_app.api.requests.context import ApiContext
from serve_app.backends.models.serving_states import ServingStates
from serve_app.config import AppConfig
from serve_app.ingress import AppParts
from serve_app.served_models import catalog_of
from tests.deployments.local_handle import local_backend
from tests.deployments.tiny_folder import save_text_model
from tests.faults.cut_replicas import Cut, Cuts, Router, two_replicas
from tests.serve_app.fake_pooler import FakeClassifier, FakeEmbedder
from tests.serve_app.fakes import FakeBackend, FakeClock

SEEDED: dict[str, Any] = {"seed": 7, "temperature": 1.0, "max_tokens": 24, "ignore_eos": True}


def config(**limits: object) -> AppConfig:
    return AppConfig.model_validate(
        {"models": [{"id": "m", "source": "nowhere"}], "limits": limits}
    )


def model_over(parts: AppParts, id_: str | None = "m") -> Model:
    """Return a model of an application in this process."""

    @asynccontextmanager
    async def reach(model_id: str | None, application: str | None) -> AsyncIterator[ApiContext]:
        catalog = catalog_of(parts, ServingStates())
        yield ApiContext(catalog, parts.config.limits, FakeClock())

    return Model(id_, reach=reach)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def model(backend: FakeBackend) -> Model:
    return model_over(AppParts(config(), {"m": backend}))


async def test_a_chat_is_streamed_and_its_last_delta_has_the_usage(model: Model) -> None:
    deltas = [delta async for delta in model.chat("Hello?")]
    assert [delta.text for delta in deltas] == ["Hello", ", world", "!", ""]
    assert [delta.finish_reason for delta in deltas] == [None, None, None, "stop"]
    assert [delta.usage is None for delta in deltas] == [True, True, True, False]
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (7, 5)


async def test_a_whole_chat_is_the_api_s_own_answer(model: Model, backend: FakeBackend) -> None:
    messages = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"})
    answer = await model.chat(messages, max_tokens=9, temperature=0)
    assert answer.text == answer.choices[0].message.content == "Hello, world!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == 12
    (asked,) = backend.requests
    assert (asked.sampling.max_tokens, asked.sampling.temperature) == (9, 0)
    assert [message.role for message in asked.prompt if not isinstance(message, (str, int))] == [
        "system",
        "user",
    ]


async def test_several_answers_come_with_their_indexes_and_one_usage(model: Model) -> None:
    texts, usages = ["", ""], []
    async for delta in model.chat("Hello?", n=2):
        texts[delta.index] += delta.text
        usages += [] if delta.usage is None else [delta.usage.completion_tokens]
    assert texts == ["Hello, world!"] * 2
    assert usages == [10]


async def test_a_completion_is_streamed_and_whole(model: Model) -> None:
    echoed = [delta async for delta in model.complete("Say: ", echo=True)]
    assert "".join(delta.text for delta in echoed) == "Say: Hello, world!"
    assert (echoed[-1].finish_reason, echoed[-1].usage is None) == ("stop", False)
    assert (await model.complete(["a", "b"])).choices[1].text == "Hello, world!"


async def test_tool_calls_and_logprobs_are_typed(model: Model, backend: FakeBackend) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    caller = FakeBackend([[TextDelta((1,), call, FinishReason.STOP)]], tool_call_format="hermes")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    model = model_over(AppParts(config(), {"m": caller}))
    found = [delta async for delta in model.chat("Call f.", tools=tools)]
    calls = [call for delta in found for call in delta.tool_calls]
    assert calls[0].function.name == "f"
    assert "".join(call.function.arguments for call in calls) == '{"x": 1}'
    assert found[-1].finish_reason == "tool_calls"
    assert Delta() == Delta("", 0, "", (), None, None, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1}, "Unknown parameter: 'temprature'. Did you mean 'temperature'?"),
        ({"max_tokens": 0}, "max_tokens must be at least 1."),
        ({"temperature": 3.0}, "temperature must be"),
    ],
)
async def test_a_wrong_option_is_refused_in_the_words_of_the_api(
    model: Model, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        await model.chat("Hello?", **options)
    assert str(refused.value).startswith(message)
    assert refused.value.param == next(iter(options))
    with pytest.raises(InvalidRequestError):
        [delta async for delta in model.chat("Hello?", **options)]


@pytest.mark.parametrize("name", ["model", "stream", "stream_options"])
def test_how_an_answer_is_read_is_no_option(model: Model, name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is no option: "):
        model.chat("Hello?", **{name: None})


async def test_an_argument_is_no_option_and_what_no_body_could_hold_is_refused(
    model: Model,
) -> None:
    with pytest.raises(TypeError, match="messages is no option: it is the first argument"):
        model.chat("Hello?", messages=[])
    with pytest.raises(InvalidRequestError, match="can't be written as JSON"):
        await model.chat("\ud800")


async def test_an_overload_is_raised_before_the_first_delta(backend: FakeBackend) -> None:
    backend.refusal = OverloadedError("full", None, 3.0)
    with pytest.raises(OverloadedError) as refused:
        await anext(aiter(model_over(AppParts(config(), {"m": backend})).chat("Hello?")))
    assert refused.value.retry_after_s == 3.0


async def test_a_failure_is_raised_after_what_had_come(backend: FakeBackend) -> None:
    backend.steps = [[TextDelta((1,), "He")], GenerationFailedError("broken")]
    deltas = aiter(model_over(AppParts(config(), {"m": backend})).chat("Hello?"))
    assert (await anext(deltas)).text == "He"
    with pytest.raises(GenerationFailedError, match="broken"):
        await anext(deltas)


async def test_the_limits_of_the_file_hold(backend: FakeBackend) -> None:
    backend.steps = [asyncio.Event()]
    model = model_over(AppParts(config(first_token_timeout_s=0.01), {"m": backend}))
    with pytest.raises(FirstTokenTimeoutError):
        await model.chat("Hello?")
    assert backend.streams[0].closed.is_set()


async def leave_by_break(deltas: AsyncIterator[Delta]) -> None:
    async for _ in deltas:
        break


async def leave_by_error(deltas: AsyncIterator[Delta]) -> None:
    with suppress(ZeroDivisionError):
        async for _ in deltas:
            raise ZeroDivisionError


async def leave_by_cancelling(deltas: AsyncIterator[Delta]) -> None:
    task = asyncio.ensure_future(anext(deltas))
    await task
    waiting = asyncio.ensure_future(anext(deltas))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize("leave", [leave_by_break, leave_by_error, leave_by_cancelling])
async def test_to_leave_the_loop_frees_the_place(
    backend: FakeBackend, leave: Callable[[AsyncIterator[Delta]], Any]
) -> None:
    backend.steps = [[TextDelta((1,), "He")], asyncio.Event()]
    await leave(aiter(model_over(AppParts(config(), {"m": backend})).chat("Hello?")))
    async with asyncio.timeout(10):
        await backend.streams[0].closed.wait()


async def test_texts_are_classified_and_embedded() -> None:
    parts = AppParts(config(), {}, {"c": FakeClassifier()}, {"e": FakeEmbedder()})
    labelled = await model_over(parts, "c").classify(("one", "TWO"), top_k=1)
    assert [text.label for text in labelled.data] == ["small", "capital"]
    assert [len(text.scores) for text in labelled.data] == [1, 1]
    vectors = await model_over(parts, "e").embed(["a", "cc"])
    assert vectors.tolist() == [[1, 0, 0, 0], [0, 0, 1, 0]]
    assert vectors.dtype == np.float32
    assert (await model_over(parts, None).embed("d")).tolist() == [[0, 0, 0, 1]]
    with pytest.raises(WrongTaskError):
        await model_over(parts, "e").classify("one")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("qwen2"))


@pytest.fixture
def ids(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Give the requests these ids, in order, as a deployment's own requests do."""
    ids: list[str] = []
    monkeypatch.setattr("raystream.request.chosen_id", lambda given: ids.pop(0))
    yield ids
    assert ids == []


async def test_a_text_goes_on_at_another_replica(folder: Path, ids: list[str]) -> None:
    ids += ["undisturbed", "cut", "whole"]
    cuts = Cuts()
    cuts.plan("cut", (Cut(5, True), Cut(11, False)))
    cuts.plan("whole", (Cut(7, True),))
    with two_replicas(folder, cuts) as generators:
        async with AsyncExitStack() as stack:
            backends = [
                await stack.enter_async_context(aclosing(local_backend(each)))
                for each in generators
            ]
            parts = AppParts(config(failover_timeout_s=30), {"m": Router(backends)})
            model = model_over(parts)
            undisturbed = [delta async for delta in model.chat("Hello?", **SEEDED)]
            deltas = [delta async for delta in model.chat("Hello?", **SEEDED)]
            whole = await model.chat("Hello?", **SEEDED)
    text = "".join(delta.text for delta in undisturbed)
    assert "".join(delta.text for delta in deltas) == text == whole.text
    assert cuts.num_made == 3
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.completion_tokens == whole.usage.completion_tokens == 24
