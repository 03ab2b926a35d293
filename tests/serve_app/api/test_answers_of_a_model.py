"""The surfaces over a replica of a tiny model: streamed, whole, alone and together are the same."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from deployments.channel.server import ChannelServer
from deployments.contract.descriptions import ModelDescription
from deployments.contract.generation import Accepted, GenerationEvent, GenerationRequest
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.generator_replica import GeneratorReplica
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.local_handle import local_backend
from tests.deployments.tiny_folder import save_text_model
from tests.engine.tiny_models import wide_qwen2
from tests.engines import EngineName
from tests.serve_app.apps import CHAT, Client, client_of, question
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.local_replica import local_generator
from tests.serve_app.sse_decoder import events_of, stream_events

TRICKY = "one\n\ntwo\r\n  three\t\n data: [DONE]\n👩‍👩‍👧 日本語 é\u0301 \u2028end\n"
SEEDED: dict[str, Any] = {"model": "m", "seed": 7, "temperature": 1.2, "max_tokens": 20}
SAME = {"prompt": "same", "max_tokens": 60, "seed": 1, "ignore_eos": True, "stream": False}


@pytest.fixture(scope="module")
def generator(
    tmp_path_factory: pytest.TempPathFactory, engine_name: EngineName
) -> Iterator[GeneratorReplica]:
    folder = save_text_model(tmp_path_factory.mktemp("qwen2"), wide_qwen2())
    with local_generator(folder, engine_name) as made:
        yield made


@pytest.fixture
async def app(generator: GeneratorReplica, config: AppConfig) -> AsyncIterator[FastAPI]:
    async with aclosing(local_backend(generator)) as backend:
        yield build_app(AppParts(config, {"m": backend}))


async def test_several_prompts_are_completed_the_same_streamed_whole_and_alone(
    openai_client: openai.AsyncOpenAI,
) -> None:
    prompts = ["one", "another", "a third"]
    asked: dict[str, Any] = {**SEEDED, "prompt": prompts, "n": 2, "logprobs": 2}
    create = openai_client.completions.create
    whole = await create(**asked)
    texts, tokens = [""] * 6, [list[str]() for _ in range(6)]
    counted: Any = {"include_usage": True}
    chunks = [c async for c in await create(**asked, stream=True, stream_options=counted)]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.logprobs.tokens for choice in whole.choices if choice.logprobs] == tokens
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert whole.usage.completion_tokens == sum(map(len, tokens))
    assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens
    alone = await create(**SEEDED, prompt=prompts[1])
    assert alone.choices[0].text == texts[2]


async def test_the_first_of_several_answers_equals_a_single_one_and_all_have_logprobs(
    openai_client: openai.AsyncOpenAI,
) -> None:
    asked: dict[str, Any] = {
        **SEEDED,
        "messages": [{"role": "user", "content": "Hello"}],
        "frequency_penalty": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    create = openai_client.chat.completions.create
    alone = await create(**asked)
    several = await create(**asked, n=3)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == alone.choices[0].message.content
    assert len(set(texts)) == 3
    assert several.usage is not None
    assert alone.usage is not None
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens
    told = [(choice.logprobs and choice.logprobs.content) or [] for choice in several.choices]
    assert sum(map(len, told)) == several.usage.completion_tokens
    streamed: dict[int, str] = {}
    async for chunk in await create(**asked, n=3, stream=True):
        for choice in chunk.choices:
            text = streamed.get(choice.index, "") + (choice.delta.content or "")
            streamed[choice.index] = text
    assert [streamed[index] for index in range(3)] == texts


async def test_text_generation_counts_tokens_exactly(client: Client) -> None:
    body = {"prompt": "abc", "max_tokens": 25, "seed": 3, "ignore_eos": True}
    *events, done = await stream_events(client, "/text-generation", body)
    assert done == "[DONE]"
    assert sum(event["token_count"] for event in events) == 25
    assert events[-1]["total_token_count"] == 25
    whole = (await client.post("/text-generation", json={**body, "stream": False})).json()
    assert whole["response"] == "".join(event["text"] for event in events)
    assert whole["token_count"] == 25


async def test_tokens_unknown_to_the_model_are_refused(openai_client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="token ids must be from 0 to") as caught:
        await openai_client.completions.create(model="m", prompt=[5, 2**31 - 1])
    assert caught.value.param == "prompt"


def has_text(call: AsgiCall) -> bool:
    return b'"content":' in call.body


async def test_clients_that_leave_do_not_affect_others(app: FastAPI, client: Client) -> None:
    async def answer() -> str:
        text: str = (await client.post("/text-generation", json=SAME)).json()["response"]
        return text

    alone = await answer()
    endless = question(stream=True, ignore_eos=True)
    async with AsyncExitStack() as stack:
        leavers = [await stack.enter_async_context(AsgiCall(app, CHAT, endless)) for _ in range(3)]
        for leaver in leavers:
            await leaver.wait_until(partial(has_text, leaver))
        company = [asyncio.create_task(answer()) for _ in range(4)]
        for leaver in leavers:
            leaver.leave()
        assert set(await asyncio.gather(*company)) == {alone}


class Echo:
    """Answers with the prompt's own text, one character at a time."""

    def __init__(self) -> None:
        self.channels = ChannelServer("127.0.0.1")

    async def describe(self) -> ModelDescription:
        return ModelDescription(
            "m", 0, 1000, accepts_images=False, default_sampling=SamplingParams()
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[GenerationEvent]]:
        message = request.prompt[0]
        assert isinstance(message, ChatMessage)
        part = message.parts[0]
        assert isinstance(part, TextPart)
        assert request.stream is not None
        address = await self.channels.address()
        with self.channels.stream(request.stream) as stream:
            yield [Accepted(1, channel=address)]
            for character in part.text:
                stream.put(TextDelta((1,), character))
                self.channels.flush()
            stream.put(TextDelta((1,), "", FinishReason.STOP))
            self.channels.flush()
            await stream.wait_until_ended()


async def test_text_arrives_unchanged_streamed_and_unstreamed(config: AppConfig) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": TRICKY}]}
    echo = Echo()
    async with (
        aclosing(local_backend(echo)) as backend,
        client_of(build_app(AppParts(config, {"m": backend}))) as client,
    ):
        streamed = await client.post(CHAT, json={**body, "stream": True})
        whole = (await client.post(CHAT, json=body)).json()
    echo.channels.close()
    *chunks, done = events_of(streamed.content)
    assert done == "[DONE]"
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == TRICKY
    assert whole["choices"][0]["message"]["content"] == TRICKY
