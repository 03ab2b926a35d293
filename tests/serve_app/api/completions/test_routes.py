import asyncio
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from deployments.contract.errors import GenerationFailedError, OverloadedError
from deployments.contract.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from tests.serve_app.apps import AppClient, Client
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import HELLO, FakeBackend, Step
from tests.serve_app.sse_decoder import stream_events

PATH = "/v1/completions"
HI: dict[str, Any] = {"model": "m", "prompt": "hi"}
BYE: list[Step] = [[TextDelta((21, 22), "Bye")], [TextDelta((23,), ".", FinishReason.LENGTH)]]


async def chunks_of(client: AppClient, **fields: Any) -> list[Any]:
    return await stream_events(client, PATH, {**HI, **fields})


async def test_a_whole_answer_has_openai_s_shape(client: Client) -> None:
    answer = await client.post(PATH, json=HI, headers={"x-request-id": "mine"})
    assert answer.json() == {
        "id": "cmpl-mine",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": "fp_fake",
        "choices": [
            {"index": 0, "text": "Hello, world!", "logprobs": None, "finish_reason": "stop"}
        ],
        "usage": {
            "prompt_tokens": 7,
            "completion_tokens": 5,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a\n b", ["a\n b"]),
        (["a", "b"], ["a", "b"]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ],
)
async def test_a_prompt_reaches_the_replica_unchanged(
    client: Client, prompt: Any, prompts: list[Any]
) -> None:
    answer = await client.post(PATH, json={**HI, "prompt": prompt})
    assert [request.prompt for request in client.backend.requests] == prompts
    body = answer.json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(prompts)))
    assert body["usage"]["prompt_tokens"] == 7 * len(prompts)
    assert body["usage"]["completion_tokens"] == 5 * len(prompts)


async def test_each_prompt_has_n_consecutive_answers_and_counts_once(client: Client) -> None:
    client.backend.scripts = [HELLO, BYE, BYE, HELLO]
    body = {**HI, "prompt": ["a", "b"], "n": 2, "seed": 5, "best_of": 2}
    answer = (await client.post(PATH, json=body)).json()
    told = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert told == [(0, "Hello, world!"), (1, "Bye."), (2, "Bye."), (3, "Hello, world!")]
    assert answer["usage"]["prompt_tokens"] == 14
    assert [request.prompt for request in client.backend.requests] == ["a", "a", "b", "b"]
    seeds = [request.sampling.seed for request in client.backend.requests]
    # A prompt in a list has the same answer as the prompt by itself.
    assert seeds[0] == 5
    assert seeds[:2] == seeds[2:]


async def test_a_text_has_sixteen_tokens_by_default(client: Client) -> None:
    await client.post(PATH, json=HI)
    await client.post(PATH, json={**HI, "max_tokens": 40})
    first, second = client.backend.requests
    assert (first.sampling.max_tokens, first.default_max_tokens) == (None, 16)
    assert second.sampling.max_tokens == 40


async def test_echo_puts_the_prompt_before_each_of_its_answers(client: Client) -> None:
    prompts = [[104, 105], [121, 111]]
    fields = {"prompt": prompts, "n": 2, "echo": True}
    whole = (await client.post(PATH, json={**HI, **fields})).json()["choices"]
    texts = [choice["text"] for choice in whole]
    assert texts == ["hiHello, world!"] * 2 + ["yoHello, world!"] * 2
    *chunks, _ = await chunks_of(client, **fields)
    streamed = [""] * 4
    for chunk in chunks:
        choice = chunk["choices"][0]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts


async def test_echo_of_unknown_tokens_is_refused_and_closes_the_answers(client: Client) -> None:
    error = await client.refused(PATH, {**HI, "prompt": [2**30], "echo": True, "n": 2})
    assert error["param"] == "prompt"
    assert [stream.closed.is_set() for stream in client.backend.streams] == [True, True]


async def test_a_request_that_is_not_admitted_is_not_detokenized(client: Client) -> None:
    client.backend.refusal = OverloadedError("busy", None, 1)
    await client.ask(PATH, {**HI, "prompt": [104], "echo": True}, 503)
    assert not client.backend.detokenized


async def test_a_stream_ends_with_the_finish_on_the_last_text_then_usage_and_done(
    client: Client,
) -> None:
    *chunks, usage, done = await chunks_of(client, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert [chunk["choices"][0] for chunk in chunks] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": ", world", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "!", "logprobs": None, "finish_reason": "stop"},
    ]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 12


async def test_several_prompts_are_streamed_under_their_indexes(client: Client) -> None:
    client.backend.scripts = [HELLO, BYE]
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, _ = await chunks_of(client, prompt=["a", "b"], stream_options=options)
    for index, text, reason in ((0, "Hello, world!", "stop"), (1, "Bye.", "length")):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(choice["text"] for choice in mine) == text
        assert mine[-1]["finish_reason"] == reason
    assert usage["usage"]["completion_tokens"] == chunks[-1]["usage"]["completion_tokens"] == 8
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {14}


async def test_a_stream_that_breaks_ends_with_an_error_and_without_done(client: Client) -> None:
    client.backend.scripts = [HELLO, [BYE[0], GenerationFailedError("gone")]]
    events = await chunks_of(client, prompt=["a", "b"])
    assert events[-1]["error"]["message"] == "gone"
    assert "[DONE]" not in events
    assert all(stream.closed.is_set() for stream in client.backend.streams)


async def test_a_refused_prompt_refuses_the_whole_request(client: Client) -> None:
    client.backend.scripts = [HELLO, OverloadedError("busy")]
    error = await client.refused(PATH, {**HI, "prompt": ["a", "b"], "stream": True}, 503)
    assert error["code"] == "overloaded"
    assert all(stream.closed.is_set() for stream in client.backend.streams)


async def test_a_disconnect_closes_every_prompt_s_stream(
    app: FastAPI, backend: FakeBackend
) -> None:
    backend.steps = [HELLO[0], asyncio.Event()]
    async with AsgiCall(app, PATH, {**HI, "prompt": ["a", "b"], "stream": True}) as call:
        await call.wait_until(lambda: call.body.count(b"Hello") == 2)
        call.leave()
        await call.end()
    assert [stream.closed.is_set() for stream in backend.streams] == [True] * 2


@pytest.mark.parametrize(("num_prompts", "n", "status"), [(8, 1, 200), (4, 2, 200), (3, 3, 400)])
async def test_prompts_times_n_are_bounded_and_the_error_names_the_limit(
    client: Client, num_prompts: int, n: int, status: int
) -> None:
    answer = await client.ask(PATH, {**HI, "prompt": ["a"] * num_prompts, "n": n}, status)
    if status == 400:
        error = answer.json()["error"]
        assert error["param"] == "prompt"
        assert "max_num_prompts" in error["message"]
        assert not client.backend.requests


def told(token_id: int, data: bytes, *top: TokenLogprob) -> TokenLogprobs:
    return TokenLogprobs(TokenLogprob(token_id, data, -1.5), top)


E_ACUTE: list[Step] = [
    [TextDelta((5,), "", logprobs=(told(5, b"a\xc3", TokenLogprob(1, b"e", -0.25)),))],
    [TextDelta((6,), "aé", logprobs=(told(6, b"\xa9"),))],
    [TextDelta((7,), "b", FinishReason.STOP, logprobs=(told(7, b"b"),))],
]


async def test_openai_s_client_reads_the_same_logprobs_streamed_and_whole(
    openai_client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.steps = E_ACUTE
    whole = await openai_client.completions.create(model="m", prompt="hi", logprobs=1)
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["bytes:\\x61\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.token_logprobs == [-1.5, -1.5, -1.5]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"e": -0.25, "bytes:\\x61\\xc3": -1.5}
    assert logprobs.text_offset == [0, 1, 2]
    assert backend.requests[0].sampling.top_logprobs == 1
    stream = await openai_client.completions.create(model="m", prompt="hi", logprobs=1, stream=True)
    pieces = [c.logprobs for chunk in [c async for c in stream] for c in chunk.choices]
    assert [t for piece in pieces if piece for t in piece.tokens or []] == logprobs.tokens
    offsets = [o for piece in pieces if piece for o in piece.text_offset or []]
    assert offsets == logprobs.text_offset


async def test_openai_s_client_reads_the_same_text_streamed_and_whole(
    openai_client: openai.AsyncOpenAI,
) -> None:
    whole = await openai_client.completions.create(model="m", prompt="hi", echo=True)
    stream = await openai_client.completions.create(
        model="m", prompt="hi", echo=True, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].text == "hiHello, world!"
    assert chunks[-1].usage == whole.usage
