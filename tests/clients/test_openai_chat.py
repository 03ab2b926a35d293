"""`openai` for Python: conversations, whole and streamed."""

import asyncio
from random import Random
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from models.training.drawings import answer_about, random_drawing
from tests.clients.questions import (
    ANSWERS,
    DETECTOR,
    LONG,
    MODEL,
    NAME,
    NARROW,
    SCRIPTED,
    SEARCH,
    about,
)
from tests.clients.tiny_poolers import EMBEDDER, RERANKER
from tests.engines import only_raystream
from tests.images import data_uri


def loose(**options: Any) -> dict[str, Any]:
    """Return a question whose sampled answers differ."""
    return about(NAME, **{"temperature": 2, "max_tokens": 16, **options})


def texts(answer: ChatCompletion) -> list[str | None]:
    return [choice.message.content for choice in answer.choices]


def test_a_whole_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**about(NAME))
    assert texts(answer) == [ANSWERS[NAME]]
    assert answer.model == MODEL
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_answer_joins_to_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**about(NAME))
    chunks: list[ChatCompletionChunk] = list(
        client.chat.completions.create(
            **about(NAME), stream=True, stream_options={"include_usage": True}
        )
    )
    *told, last = chunks
    deltas = [chunk.choices[0].delta for chunk in told]
    assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == ANSWERS[NAME]
    finishes = [chunk.choices[0].finish_reason for chunk in told]
    assert finishes == [None] * (len(told) - 1) + ["stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert last.choices == []
    assert last.usage == whole.usage


def test_the_sdk_s_stream_reader_gives_the_same_answer(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**about(NAME)) as stream:
        seen = "".join(event.delta for event in stream if event.type == "content.delta")
        answer = stream.get_final_completion()
    assert seen == ANSWERS[NAME]
    assert texts(answer) == [seen]


async def test_the_asynchronous_client_reads_many_streams_at_once(
    async_client: openai.AsyncOpenAI,
) -> None:
    names = list(ANSWERS)[:8]

    async def answer_about(name: str) -> str:
        stream = await async_client.chat.completions.create(**about(name), stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    together = await asyncio.gather(*(answer_about(name) for name in names))
    alone = [await async_client.chat.completions.create(**about(name)) for name in names]
    assert together == [texts(answer)[0] for answer in alone]


def test_a_seed_repeats_an_answer_and_n_gives_different_ones(client: openai.OpenAI) -> None:
    once = client.chat.completions.create(**loose(seed=5))
    again = client.chat.completions.create(**loose(seed=5, n=3))
    assert texts(again)[0] == texts(once)[0]
    assert len(set(texts(again))) == 3
    assert texts(client.chat.completions.create(**loose(seed=6))) != texts(once)


def test_each_token_has_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**about(NAME), logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens
    for told in logprobs.content:
        assert len(told.top_logprobs) == 3
        assert told.top_logprobs[0].token == told.token, "greedy decoding takes the likeliest"
        assert told.logprob == told.top_logprobs[0].logprob <= 0


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    stop = ANSWERS[NAME].split()[3]
    answer = client.chat.completions.create(**about(NAME), stop=[stop])
    assert texts(answer) == [ANSWERS[NAME].partition(stop)[0]]
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_truncated_answer_says_so(client: openai.OpenAI, name: str) -> None:
    answer = client.chat.completions.create(**about(NAME, **{name: 3}))
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_a_biased_token_is_always_chosen(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        **about(NAME, max_tokens=4), logit_bias={"300": 100}, logprobs=True
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 4
    assert len({told.token for told in logprobs.content}) == 1


@only_raystream("images are refused with vLLM")
def test_a_drawing_is_described(client: openai.OpenAI) -> None:
    drawing = random_drawing(Random(7))
    content: Any = [
        {"type": "image_url", "image_url": {"url": data_uri(drawing.render())}},
        {"type": "text", "text": "What is in the picture?"},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], temperature=0
    )
    assert texts(answer) == [answer_about(drawing)]


def test_the_request_id_is_returned_and_accepted(client: openai.OpenAI) -> None:
    given = client.chat.completions.create(
        **about(NAME, max_tokens=1), extra_headers={"X-Request-Id": "mine-1"}
    )
    assert given._request_id == "mine-1"
    assert client.chat.completions.create(**about(NAME, max_tokens=1))._request_id


@only_raystream("with vLLM fewer models are served")
def test_the_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [
        MODEL,
        NARROW,
        LONG,
        SCRIPTED,
        DETECTOR,
        RERANKER,
        SEARCH,
        EMBEDDER,
    ]
    assert client.models.retrieve(MODEL) == listed[0]
