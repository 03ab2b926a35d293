"""Streams that break anywhere and are resumed: the client then has the whole answer, once."""

import asyncio
import json
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from deployments.contract.descriptions import ReasoningDescription
from deployments.contract.errors import GenerationFailedError
from deployments.contract.output import FinishReason, TextDelta, TokenLogprob, TokenLogprobs
from deployments.contract.sampling_params import ReasoningTokens
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.metrics import DELIVERED_TOKENS, IngressMetrics
from serve_app.streaming.event_id import LAST_EVENT_ID
from tests.offenders import for_each
from tests.serve_app.apps import Client, access_lines, client_of, make_app
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fakes import HELLO, FakeBackend, FakeClock, Step
from tests.serve_app.ingress_numbers import numbers
from tests.serve_app.sse_decoder import SseDecoder

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ACCEPT = {"Accept": "text/event-stream"}
START, END = 501, 502
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "get_time")]
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True}
CONTINUE: dict[str, Any] = {"model": "m", "prompt": "Once", "stream": True}

PIECES = st.sampled_from(
    [
        "<think>", "</think>", "\n", "Hm.", " ", "<tool", "_call>", "<tool_call>", "</tool_call>",
        '{"name": "f", ', '"arguments": {', '"a": 1', "}", "}}", "]", '"', "Köln", "🙂", "text",
        '{"name": "get_time", "arguments": {}}', '{"arguments": {}, "name": "f"}',
    ]
)  # fmt: skip
TEXTS = st.lists(st.tuples(PIECES, st.booleans()), max_size=12)
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
CUTS = st.lists(st.floats(0, 1), min_size=1, max_size=3)
CALLING = [("<think>", False), ("Hm.", False), ("</think>", False), ("\n", True)] + [
    (piece, False) for piece in ("Look.", "<tool_call>", '{"name": "f", "arguments": {"a": 1}}')
]
BROKEN = [("<tool_call>", False), ('{"name": "f", "arguments": {', False), ("]", False)]


@dataclass(frozen=True)
class Text:
    """What a model writes, token by token."""

    # A piece of text for each token, and whether it is held back until the next token.
    tokens: Sequence[tuple[str, bool]]
    finish: FinishReason = FinishReason.STOP  # why it ends

    def deltas(self, first_id: int, *, has_logprobs: bool) -> list[TextDelta]:
        """Return one delta for each token, and one for the last token, which has no text."""
        ids = {"<think>": START, "</think>": END}
        held, found = "", []
        for at, (piece, is_held) in enumerate((*self.tokens, ("", False))):
            text, held = ("", held + piece) if is_held else (held + piece, "")
            token_id = ids.get(piece, first_id + at)
            entry = TokenLogprobs(TokenLogprob(token_id, piece.encode(), -0.5), ())
            logprobs = (entry,) if has_logprobs else ()
            found.append(TextDelta((token_id,), text, logprobs=logprobs))
        return [*found[:-1], replace(found[-1], finish_reason=self.finish)]


def grouped(deltas: Sequence[TextDelta], sizes: Sequence[int]) -> list[Step]:
    """Return deltas in messages of these sizes, over and over."""
    left = iter(deltas)
    steps = (list(islice(left, size)) for size in cycle(sizes))
    found: list[Step] = []
    while step := next(steps):
        found.append(step)
    return found


@dataclass
class Received:
    """What a client has received of an answer, over all its attempts."""

    choices: defaultdict[int, list[tuple[str, Any]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    logprobs: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    usages: list[Any] = field(default_factory=list)
    num_done: int = 0
    last_event_id: str = ""
    errors: list[Any] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        """Add the complete events of a stream."""
        decoder = SseDecoder()
        for data in decoder.feed(body):
            if data == "[DONE]":
                self.num_done += 1
            else:
                self._take_chunk(json.loads(data))
        self.last_event_id = decoder.last_event_id or self.last_event_id
        self.comments += decoder.comments

    def _take_chunk(self, chunk: Mapping[str, Any]) -> None:
        assert self.num_done == 0
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        if not chunk["choices"]:
            self.usages.append(chunk["usage"])
        for choice in chunk["choices"]:
            told = self.choices[choice["index"]]
            for kind, text in _content(choice):
                if told and told[-1][0] == kind and isinstance(text, str):
                    told[-1] = (kind, told[-1][1] + text)
                else:
                    told.append((kind, text))
            if logprobs := choice["logprobs"]:
                entries = logprobs.get("content") or list(
                    zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
                )
                self.logprobs[choice["index"]] += entries

    @property
    def essence(self) -> object:
        """All that must be as if the stream had never broken."""
        return dict(self.choices), dict(self.logprobs), self.usages, self.num_done, self.errors


def _content(choice: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what a chunk's choice adds, in order: texts by their kind, and marks."""
    delta = choice.get("delta", {"text": choice.get("text")})
    found: list[tuple[str, Any]] = [("role", None)] if "role" in delta else []
    for kind in ("reasoning_content", "content", "text"):
        if delta.get(kind):
            found.append((kind, delta[kind]))
    for call in delta.get("tool_calls", ()):
        function = call["function"]
        if "id" in call:
            found.append(("call", (call["index"], function["name"])))
        if function["arguments"]:
            found.append((f"arguments of {call['index']}", function["arguments"]))
    if choice["finish_reason"]:
        found.append(("finish", (choice["finish_reason"],)))
    return found


def chat_backend() -> FakeBackend:
    backend = FakeBackend(tool_call_format="hermes")
    reasoning = ReasoningDescription("qwen3", ReasoningTokens(START, END))
    backend.description = replace(backend.description, reasoning=reasoning)
    return backend


@pytest.fixture(scope="module")
def chat() -> tuple[FakeBackend, FastAPI]:
    """Return a model that reasons and calls tools, and its application, for all examples."""
    backend = chat_backend()
    return backend, make_app(backend)


@pytest.fixture(scope="module")
def plain() -> tuple[FakeBackend, FastAPI]:
    """Return a model that only writes, and its application, for all examples."""
    backend = FakeBackend()
    return backend, make_app(backend)


async def read_in_attempts(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    backend: FakeBackend,
    texts: Sequence[Sequence[TextDelta]],
    sizes: Sequence[int],
    cuts: Sequence[float],
) -> Received:
    """Ask until the answer is whole; each stream but the last is cut at a part of its bytes."""
    received = Received()
    for attempt, cut in enumerate((*cuts, None)):
        turned = [*sizes[attempt % len(sizes) :], *sizes[: attempt % len(sizes)]]
        backend.scripts = [grouped(deltas, turned) for deltas in texts]
        known = {LAST_EVENT_ID: received.last_event_id} if received.last_event_id else {}
        answer = await client.post(path, json=body, headers={**ACCEPT, **known})
        if answer.status_code == 204:
            assert received.num_done == 1
            break
        assert answer.status_code == 200, answer.text
        end = len(answer.content) if cut is None else int(cut * len(answer.content))
        received.take(answer.content[:end])
    return received


async def undisturbed(
    client: httpx.AsyncClient,
    path: str,
    body: Mapping[str, Any],
    backend: FakeBackend,
    texts: Sequence[Sequence[TextDelta]],
) -> Received:
    backend.scripts = [grouped(deltas, [1]) for deltas in texts]
    answer = await client.post(path, json=body)
    received = Received()
    received.take(answer.content)
    assert (received.num_done, received.last_event_id) == (1, "")
    return received


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    texts=st.lists(
        st.builds(Text, TEXTS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH])),
        min_size=1,
        max_size=3,
    ),
    sizes=SIZES,
    cuts=CUTS,
    has_logprobs=st.booleans(),
    has_usage=st.booleans(),
    is_shown=st.booleans(),
)
@example([Text(CALLING)], [1, 5], [0.5, 0.5], True, True, True)
@example([Text(CALLING)], [2, 3], [0.8], True, True, False)
@example([Text(BROKEN)], [1, 5], [0.7], False, False, True)
@example([Text(CALLING), Text(BROKEN), Text([])], [3, 1], [0.6, 0.4], True, True, True)
async def test_a_chat_that_breaks_anywhere_is_the_undisturbed_one(
    chat: tuple[FakeBackend, FastAPI],
    texts: list[Text],
    sizes: list[int],
    cuts: list[float],
    has_logprobs: bool,
    has_usage: bool,
    is_shown: bool,
) -> None:
    backend, app = chat
    body = {**ASK, "n": len(texts), "tools": TOOLS, "include_reasoning": is_shown}
    if has_logprobs:
        body |= {"logprobs": True}
    if has_usage:
        body |= {"stream_options": {"include_usage": True}}
    written = [
        text.deltas(1000 * index, has_logprobs=has_logprobs) for index, text in enumerate(texts)
    ]
    async with client_of(app) as client:
        expected = await undisturbed(client, CHAT, body, backend, written)
        received = await read_in_attempts(client, CHAT, body, backend, written, sizes, cuts)
    assert received.essence == expected.essence


@pytest.mark.slow
@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    texts=st.lists(st.builds(Text, TEXTS), min_size=2, max_size=4),
    sizes=SIZES,
    cuts=CUTS,
    has_logprobs=st.booleans(),
)
async def test_completions_that_break_anywhere_are_the_undisturbed_ones(
    plain: tuple[FakeBackend, FastAPI],
    texts: list[Text],
    sizes: list[int],
    cuts: list[float],
    has_logprobs: bool,
) -> None:
    backend, app = plain
    prompts = [f"Prompt {index}" for index in range(len(texts))]
    body = {**CONTINUE, "prompt": prompts, **({"logprobs": 0} if has_logprobs else {"echo": True})}
    written = [
        text.deltas(1000 * index, has_logprobs=has_logprobs) for index, text in enumerate(texts)
    ]
    async with client_of(app) as client:
        expected = await undisturbed(client, COMPLETIONS, body, backend, written)
        received = await read_in_attempts(client, COMPLETIONS, body, backend, written, sizes, cuts)
    assert received.essence == expected.essence


@pytest.mark.parametrize(
    ("path", "asked"), [(CHAT, {"logprobs": True}), (COMPLETIONS, {"logprobs": 0})]
)
@pytest.mark.parametrize("text", [Text([(each, False) for each in "abcd"]), Text(CALLING)])
async def test_log_probabilities_that_come_behind_their_text_are_not_lost(
    path: str, asked: dict[str, Any], text: Text
) -> None:
    """Break twice, behind every two events: the second break may part a token from its text."""
    is_chat = path == CHAT
    backend = chat_backend() if is_chat else FakeBackend()
    body = {**(ASK | {"tools": TOOLS} if is_chat else CONTINUE), **asked, "seed": 7}
    deltas = text.deltas(0, has_logprobs=True)

    async def events(client: httpx.AsyncClient, size: int, last_id: str = "") -> list[bytes]:
        backend.scripts = [grouped(deltas, [size])]
        answer = await client.post(path, json=body, headers={**ACCEPT, LAST_EVENT_ID: last_id})
        return answer.content.splitlines(keepends=True)

    def received(*streams: Sequence[bytes]) -> Received:
        found = Received()
        for lines in streams:
            found.take(b"".join(lines))
        return found

    async with client_of(make_app(backend)) as client:
        expected = await undisturbed(client, path, body, backend, [deltas])
        first = await events(client, 1)
        for num_first in range(3, len(first) - 3, 3):
            second = await events(client, 2, received(first[:num_first]).last_event_id)
            for num_second in range(0, len(second) - 3):
                streams = first[:num_first], second[:num_second]
                third = await events(client, 1, received(*streams).last_event_id)
                found = received(*streams, third)
                assert found.essence == expected.essence, (num_first, num_second)


async def ids_of(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> list[str]:
    answer = await client.post(path, json=body, headers=ACCEPT)
    assert answer.status_code == 200, answer.text
    decoder = SseDecoder()
    assert len(decoder.feed(answer.content)) == len(decoder.ids), "an event has no id"
    return decoder.ids


async def resume(
    client: httpx.AsyncClient, body: Mapping[str, Any], last: str, path: str = CHAT
) -> httpx.Response:
    return await client.post(path, json=body, headers={LAST_EVENT_ID: last})


def told(answer: httpx.Response) -> Received:
    assert answer.status_code == 200, answer.text
    received = Received()
    received.take(answer.content)
    return received


async def test_events_have_ids_if_the_client_names_event_streams(client: Client) -> None:
    ids = await ids_of(client, CHAT, ASK)
    assert len(set(ids)) == len(ids) == 6  # the role, three texts, the finish, [DONE]
    assert {len(each) for each in ids[:-1]} == {40}
    plain = await client.post(CHAT, json=ASK)
    assert b"id: " not in plain.content


async def test_sixteen_choices_have_ids_of_a_few_hundred_bytes_and_more_have_none(
    client: Client, config: AppConfig
) -> None:
    ids = await ids_of(client, CHAT, {**ASK, "n": 16})
    assert max(map(len, ids)) == 24 + 16 * 16 + len(".done")
    backend = FakeBackend()
    async with client_of(make_app(backend)) as other:
        body = {**CONTINUE, "prompt": ["a", "b"], "n": 16}
        answer = await other.post(COMPLETIONS, json=body, headers=ACCEPT)
        assert answer.status_code == 200
        assert b"id: " not in answer.content
        refused = await resume(other, body, ids[0], COMPLETIONS)
    assert refused.status_code == 400
    assert "16 choices" in refused.json()["error"]["message"]


async def test_a_stream_with_its_prompt_s_log_probabilities_has_no_ids_and_is_not_resumed(
    client: Client,
) -> None:
    (first, *_) = await ids_of(client, COMPLETIONS, CONTINUE)
    body = {**CONTINUE, "echo": True, "logprobs": 1}
    answer = await client.post(COMPLETIONS, json=body, headers=ACCEPT)
    assert answer.status_code == 200
    assert b"id: " not in answer.content
    refused = await resume(client, body, first, COMPLETIONS)
    assert refused.status_code == 400
    assert "with the log-probabilities of its prompt" in refused.json()["error"]["message"]


async def test_the_server_s_own_seed_is_in_the_id_and_used_again(client: Client) -> None:
    ids = await ids_of(client, CHAT, {**ASK, "n": 3})
    first = [request.sampling.seed for request in client.backend.requests]
    assert len(set(first)) == 3
    assert first[0] == int.from_bytes(urlsafe_b64decode(ids[0][:24])[1:9])
    client.backend.requests.clear()
    assert told(await resume(client, {**ASK, "n": 3}, ids[4])).num_done == 1
    assert [request.sampling.seed for request in client.backend.requests] == first
    await client.post(CHAT, json=ASK, headers=ACCEPT)
    assert client.backend.requests[-1].sampling.seed != first[0]


@pytest.mark.parametrize("seed", [7, -7])
async def test_a_seed_of_the_client_s_is_kept(client: Client, seed: int) -> None:
    ids = await ids_of(client, CHAT, {**ASK, "seed": seed})
    answer = await resume(client, {**ASK, "seed": seed}, ids[1])
    assert told(answer).choices[0] == [("content", ", world!"), ("finish", ("stop",))]
    assert client.backend.requests[0].sampling == client.backend.requests[1].sampling
    other = await resume(client, {**ASK, "seed": seed + 1}, ids[1])
    assert other.status_code == 409


async def test_nothing_is_sent_behind_done(client: Client) -> None:
    ids = await ids_of(client, CHAT, ASK)
    num_requests = len(client.backend.requests)
    answer = await resume(client, ASK, ids[-1])
    assert (answer.status_code, answer.content) == (204, b"")
    assert len(client.backend.requests) == num_requests


async def test_the_usage_is_that_of_the_whole_answer_and_comes_once(client: Client) -> None:
    body = {**ASK, "stream_options": {"include_usage": True}}
    ids = await ids_of(client, CHAT, body)
    (usage,) = told(await resume(client, body, ids[2])).usages
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 5)
    assert ids[-2].endswith(".usage")
    behind = told(await resume(client, body, ids[-2]))
    assert (behind.usages, dict(behind.choices), behind.num_done) == ([], {}, 1)


@pytest.mark.parametrize(
    "change",
    [{"temperature": 0.5}, {"max_tokens": 3}, {"n": 2}, {"logprobs": True}, {"tools": TOOLS}],
    ids=lambda change: next(iter(change)),
)
async def test_another_request_is_refused_at_once(change: dict[str, Any]) -> None:
    backend = chat_backend()
    async with client_of(make_app(backend)) as client:
        ids = await ids_of(client, CHAT, ASK)
        answer = await resume(client, {**ASK, **change}, ids[1])
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (409, "answer_changed")
    assert error["param"] == LAST_EVENT_ID
    assert answer.headers["x-should-retry"] == "false"
    assert all(stream.closed.is_set() for stream in backend.streams[1:])


@pytest.mark.parametrize("attribute", ["fingerprint", "prompt_digest"])
async def test_another_model_or_prompt_is_refused_at_once(client: Client, attribute: str) -> None:
    ids = await ids_of(client, CHAT, ASK)
    changed = {"fingerprint": "fp_other", "prompt_digest": b"other"}
    client.backend.accepted = {attribute: changed[attribute]}
    answer = await resume(client, ASK, ids[1])
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "answer_changed")


async def test_the_order_of_keys_and_white_space_do_not_make_another_request(
    client: Client,
) -> None:
    ids = await ids_of(client, CHAT, {**ASK, "top_p": 1})
    body = json.dumps(dict(reversed({**ASK, "top_p": 1.0}.items())), indent=2)
    headers = {LAST_EVENT_ID: ids[1], "Content-Type": "application/json"}
    assert told(await client.post(CHAT, content=body, headers=headers)).num_done == 1


@for_each(
    ("abc", "none that this server sends"),
    ("a" * 25, "none that this server sends"),
    ("x" * 24 + ".end", "version 199"),
    (urlsafe_b64encode(b"\2" + b"\0" * 17).decode(), "version 2"),
    (urlsafe_b64encode(b"\1" + b"\xff" * 17).decode(), "none that this server sends"),
    (urlsafe_b64encode(b"\1" + b"\0" * 17).decode() + ".end", "none that this server sends"),
)
async def test_an_id_that_is_not_ours_is_refused(last: str, why: str, client: Client) -> None:
    answer = await resume(client, ASK, last)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, LAST_EVENT_ID)
    assert why in error["message"]
    assert "leave the header out" in error["message"]
    assert not client.backend.requests


@for_each(
    (CHAT, {**ASK, "stream": False}),
    ("/v1/messages", {**ASK, "max_tokens": 5}),
    ("/v1/responses", {"model": "m", "input": "?", "stream": True}),
    ("/text-generation", {"model": "m", "prompt": "?"}),
)
async def test_what_can_not_be_resumed_is_refused_by_name(
    path: str, body: dict[str, Any], client: Client
) -> None:
    (last, *_) = await ids_of(client, CHAT, ASK)
    client.backend.requests.clear()
    answer = await resume(client, body, last, path)
    assert answer.status_code == 400
    assert LAST_EVENT_ID in answer.json()["error"]["message"]
    assert not client.backend.requests


@pytest.mark.parametrize(
    "second",
    [
        [[TextDelta((11,), "Hello")], [TextDelta((99,), "?")], HELLO[2]],
        [[TextDelta((11,), "Hello", FinishReason.STOP)]],
    ],
    ids=["another token", "an earlier end"],
)
async def test_an_answer_that_differs_ends_in_an_error_and_sends_nothing_of_it(
    client: Client, second: list[Step]
) -> None:
    ids = await ids_of(client, CHAT, ASK)
    client.backend.scripts = [second]
    received = told(await resume(client, ASK, ids[2]))
    (error,) = received.errors
    assert (error["code"], error["type"]) == ("answer_changed", "invalid_request_error")
    assert "without Last-Event-ID" in error["message"]
    assert (received.num_done, dict(received.choices)) == (0, {})
    assert client.backend.streams[-1].closed.is_set()


async def test_an_answer_that_ends_before_what_was_sent_of_it_is_an_error(client: Client) -> None:
    ids = await ids_of(client, CHAT, ASK)
    short = [[TextDelta((11, 12, 13, 14), "Hello")], [TextDelta((15,), "", FinishReason.STOP)]]
    client.backend.scripts = [short]
    received = told(await resume(client, ASK, ids[2]))
    assert [error["code"] for error in received.errors] == ["answer_changed"]
    assert received.num_done == 0


async def test_a_stream_that_has_failed_is_resumed_behind_its_last_event(client: Client) -> None:
    client.backend.scripts = [[*HELLO[:1], GenerationFailedError("no")]]
    answer = await client.post(CHAT, json=ASK, headers=ACCEPT)
    received = told(answer)
    assert [error["code"] for error in received.errors] == ["generation_failed"]
    received.take((await resume(client, ASK, received.last_event_id)).content)
    assert received.choices[0] == [
        ("role", None),
        ("content", "Hello, world!"),
        ("finish", ("stop",)),
    ]


async def test_comments_tell_how_far_the_answer_is_and_the_first_comes_at_once(
    backend: FakeBackend,
) -> None:
    deltas = Text([("x", False)] * 12).deltas(0, has_logprobs=False)
    backend.steps = grouped(deltas, [1])
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    app = build_app(AppParts(config, {"m": backend}, clock=FakeClock()))
    async with AsgiCall(app, CHAT, ASK, headers=ACCEPT) as call:
        await call.end()
    last = SseDecoder()
    last.feed(call.body)
    stop = asyncio.Event()
    backend.steps = [stop, *backend.steps]
    headers = {LAST_EVENT_ID: last.ids[10]}
    async with AsgiCall(app, CHAT, ASK, headers=headers) as call:
        await call.wait_until(lambda: call.body == b": resuming, 0 of 10 tokens\n")
        stop.set()
        await call.end()
    # Each look at the fake clock takes half a second.
    decoder = SseDecoder()
    decoder.feed(call.body)
    assert decoder.comments == [f"resuming, {n} of 10 tokens" for n in (0, 4, 8)]


async def test_what_is_generated_again_is_charged_but_delivered_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    backend, metrics = FakeBackend(), IngressMetrics(["m"])
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    app = build_app(AppParts(config, {"m": backend}, clock=FakeClock(), metrics=metrics))
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        ids = await ids_of(client, CHAT, ASK)
        assert numbers(metrics, DELIVERED_TOKENS) == {("m", ""): 5}
        assert told(await resume(client, ASK, ids[2])).num_done == 1
    assert numbers(metrics, DELIVERED_TOKENS) == {("m", ""): 6}
    # The same number is charged to the key.
    assert [line["completion_tokens"] for line in access_lines(caplog)] == [5, 5]
