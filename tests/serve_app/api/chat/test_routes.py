import asyncio
from math import inf
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from deployments.contract.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    ReplicaUnavailableError,
)
from deployments.contract.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from tests.serve_app.apps import AppClient, Client
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import HELLO, FakeBackend, FakeClock
from tests.serve_app.sse_decoder import events_of, stream_events

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
AWKWARD = [
    "Hi",
    "\n",
    "\n\n",
    "  two spaces",
    "\r\n",
    "🙂",
    "你好",
    "\u2028",
    "data: [DONE]\n\n",
    '"',
]

OTHER: list[Any] = [[TextDelta((21, 22), "Bye")], [TextDelta((23,), ".", FinishReason.LENGTH)]]


def usage(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int = 0) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


async def chunks_of(client: AppClient, **fields: Any) -> list[Any]:
    return await stream_events(client, CHAT, {**HI, **fields})


async def test_a_whole_answer_has_openai_s_shape(client: Client) -> None:
    answer = await client.post(CHAT, json=HI, headers={"x-request-id": "mine"})
    assert answer.json() == {
        "id": "chatcmpl-mine",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": "fp_fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello, world!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": usage(7, 5),
    }


async def test_a_stream_holds_role_text_finish_usage_and_done_in_this_order(client: Client) -> None:
    *chunks, done = await chunks_of(client, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Hello"},
        {"content": ", world"},
        {"content": "!"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None, None, None, None, "stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == usage(7, 5)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["system_fingerprint"] for chunk in chunks} == {"fp_fake"}


async def test_a_stream_has_no_usage_by_default(client: Client) -> None:
    *chunks, _ = await chunks_of(client)
    assert all("usage" not in chunk for chunk in chunks)


async def test_every_chunk_has_the_usage_so_far_if_requested(client: Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await chunks_of(client, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [0, 1, 4, 5, 5, 5]


async def test_streamed_text_is_the_unstreamed_text(client: Client) -> None:
    client.backend.steps = [[TextDelta((i,), text)] for i, text in enumerate(AWKWARD)]
    client.backend.steps = [*client.backend.steps, [TextDelta((99,), "", FinishReason.LENGTH)]]
    whole = (await client.post(CHAT, json=HI)).json()["choices"][0]
    *chunks, _ = await chunks_of(client)
    choices = [chunk["choices"][0] for chunk in chunks]
    streamed = "".join(choice["delta"].get("content", "") for choice in choices)
    assert streamed == whole["message"]["content"] == "".join(AWKWARD)
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"


@pytest.mark.parametrize(
    "last", [ReplicaUnavailableError("gone"), GenerationAbortedError("aborted")]
)
async def test_a_stream_that_breaks_ends_with_an_error_and_without_done(
    client: Client, last: Any
) -> None:
    client.backend.scripts = [[HELLO[0], last], *[ReplicaUnavailableError("gone")] * 9]
    events = await chunks_of(client)
    assert events[-1]["error"]["code"] == "replica_unavailable"
    assert "[DONE]" not in events
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])


async def test_a_whole_answer_that_breaks_is_an_error(client: Client) -> None:
    client.backend.steps = [HELLO[0], GenerationFailedError("out of memory")]
    answer = await client.ask(CHAT, HI, 500)
    assert answer.json()["error"]["message"] == "out of memory"


async def test_deltas_are_sent_as_they_arrive_and_a_disconnect_closes_the_stream(
    app: FastAPI, backend: FakeBackend
) -> None:
    backend.steps = [HELLO[0], asyncio.Event(), HELLO[2]]
    async with AsgiCall(app, CHAT, {**HI, "stream": True}) as call:
        await call.wait_until(lambda: b"Hello" in call.body)
        assert not backend.streams[0].closed.is_set()
        call.leave()
        await call.end()
    assert backend.streams[0].closed.is_set()
    assert b"[DONE]" not in call.body


async def test_a_cancelled_whole_answer_closes_the_stream(
    app: FastAPI, backend: FakeBackend
) -> None:
    backend.steps = [HELLO[0], asyncio.Event()]
    async with AsgiCall(app, CHAT, HI) as call, asyncio.timeout(30):
        await backend.opened.wait()
        await backend.streams[0].waits.wait()
        call.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.end()
    assert backend.streams[0].closed.is_set()


async def test_a_quiet_stream_is_pinged(
    app: FastAPI, backend: FakeBackend, clock: FakeClock
) -> None:
    release = asyncio.Event()
    backend.steps = [release, *HELLO]
    accept = {"Accept": "text/event-stream"}
    async with AsgiCall(app, CHAT, {**HI, "stream": True}, headers=accept) as call:
        await call.wait_until(lambda: b"assistant" in call.body)
        clock.wake.release()
        await call.wait_until(lambda: b": ping\n" in call.body)
        release.set()
        await call.end()
    assert events_of(call.body)[-1] == "[DONE]"


async def test_the_request_id_reaches_the_replica(client: Client) -> None:
    await client.post(CHAT, json=HI, headers={"x-request-id": "mine"})
    assert [request.request_id for request in client.backend.requests] == ["mine"]


async def test_several_whole_answers_share_one_usage(client: Client) -> None:
    client.backend.scripts = [HELLO, OTHER]
    answer = (await client.post(CHAT, json={**HI, "n": 2, "seed": 3})).json()
    told = [(c["index"], c["message"]["content"], c["finish_reason"]) for c in answer["choices"]]
    assert told == [(0, "Hello, world!", "stop"), (1, "Bye.", "length")]
    assert answer["usage"] == usage(7, 8)
    first, second = (request.sampling for request in client.backend.requests)
    assert first.seed == 3
    assert second == first.of_choice(1)


async def test_several_answers_are_streamed_under_their_indexes(client: Client) -> None:
    client.backend.scripts = [HELLO, OTHER]
    *chunks, usage, done = await chunks_of(client, n=2, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 8
    choices = [chunk["choices"][0] for chunk in chunks]
    for index, text, reason in ((0, "Hello, world!", "stop"), (1, "Bye.", "length")):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [choice["finish_reason"] for choice in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1]["finish_reason"] == reason


async def test_one_answer_that_breaks_ends_the_stream_with_an_error_and_without_done(
    client: Client,
) -> None:
    client.backend.scripts = [HELLO, [OTHER[0], GenerationFailedError("gone")]]
    events = await chunks_of(client, n=2)
    assert events[-1]["error"]["message"] == "gone"
    assert "[DONE]" not in events
    assert all(stream.closed.is_set() for stream in client.backend.streams)


async def test_a_disconnect_closes_every_answer(app: FastAPI, backend: FakeBackend) -> None:
    backend.steps = [HELLO[0], asyncio.Event()]
    async with AsgiCall(app, CHAT, {**HI, "stream": True, "n": 3}) as call:
        await call.wait_until(lambda: call.body.count(b"Hello") == 3)
        call.leave()
        await call.end()
    assert [stream.closed.is_set() for stream in backend.streams] == [True] * 3
    assert b"[DONE]" not in call.body


def told(token_id: int, data: bytes, logprob: float) -> TokenLogprobs:
    return TokenLogprobs(
        TokenLogprob(token_id, data, logprob),
        (TokenLogprob(1, b"e", -0.25), TokenLogprob(2, b"\xc3", -inf)),
    )


E_ACUTE: list[Any] = [
    [TextDelta((5,), "", logprobs=(told(5, b"\xc3", -1.5),))],
    [TextDelta((6,), "é", logprobs=(told(6, b"\xa9", -0.5),))],
    [TextDelta((7,), "", FinishReason.STOP, logprobs=(told(7, b"<eos>", -0.125),))],
]


async def test_openai_s_client_reads_the_logprobs_of_every_token_streamed_and_whole(
    openai_client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.steps = E_ACUTE
    messages: Any = HI["messages"]
    asked: Any = {"model": "m", "messages": messages, "logprobs": True, "top_logprobs": 2}
    whole = await openai_client.chat.completions.create(**asked)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    content = logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == ["\ufffd", "\ufffd", "<eos>"]
    assert bytes(b for entry in content[:2] for b in entry.bytes or []).decode() == "é"
    assert [entry.logprob for entry in content] == [-1.5, -0.5, -0.125]
    assert [likely.logprob for likely in content[0].top_logprobs] == [-0.25, -9999.0]
    assert whole.usage is not None
    assert len(content) == whole.usage.completion_tokens
    stream = await openai_client.chat.completions.create(stream=True, **asked)
    choices = [choice async for chunk in stream for choice in chunk.choices]
    streamed = [entry for c in choices if c.logprobs for entry in c.logprobs.content or []]
    assert streamed == content
    # A token of half a character has its bytes reported before there is any text.
    assert choices[1].delta.content == ""
    assert choices[1].logprobs is not None


def cached(num_cached_tokens: int) -> list[Any]:
    return [[TextDelta((1,), "a", num_cached_tokens=num_cached_tokens)], HELLO[2]]


async def test_tokens_that_another_answer_computed_do_not_count_as_cached(client: Client) -> None:
    client.backend.scripts = [cached(2), cached(6), cached(6)]
    answer = (await client.post(CHAT, json={**HI, "n": 3})).json()
    assert answer["usage"] == usage(7, 6, num_cached_tokens=2)


async def test_the_usage_so_far_counts_cached_tokens_of_answers_that_have_begun(
    client: Client,
) -> None:
    client.backend.steps = cached(5)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, _ = await chunks_of(client, stream_options=options)
    found = [chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks]
    assert found == [0, 5, 5, 5, 5]


async def test_continuous_usage_needs_include_usage(client: Client) -> None:
    body = {**HI, "stream": True, "stream_options": {"continuous_usage_stats": True}}
    error = await client.refused(CHAT, body)
    assert error["code"] == "invalid_combination"
    assert error["param"] == "stream_options.continuous_usage_stats"
