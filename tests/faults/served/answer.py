"""Streamed answers as a client reads them, event by event."""

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Literal
from uuid import uuid4

import httpx
import pytest

COUNTED = {"include_usage": True, "continuous_usage_stats": True}
"""Stream options by which each chunk tells how many tokens there are so far."""

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

CACHE_FIELDS = frozenset({"prompt_tokens_details"})
"""Fields of the usage that depend on what a replica has computed before."""


@dataclass
class Choice:
    """What a client has received of one choice."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def gain(self, chunk: Mapping[str, Any]) -> None:
        """Add what a chunk holds of this choice."""
        assert self.finish_reason is None, "a choice went on after its finish"
        delta = chunk.get("delta", chunk)
        self.text += delta.get("content") or delta.get("text") or ""
        for part in delta.get("tool_calls") or ():
            call = self.calls.setdefault(part["index"], {"name": "", "arguments": ""})
            called = part.get("function") or {}
            call["name"] += called.get("name") or ""
            call["arguments"] += called.get("arguments") or ""
        self._gain_logprobs(chunk.get("logprobs") or {})
        self.finish_reason = chunk.get("finish_reason")

    def _gain_logprobs(self, logprobs: Mapping[str, Any]) -> None:
        columns = [logprobs[name] for name in sorted(logprobs) if logprobs[name] is not None]
        self.logprobs += zip(*columns, strict=True)


@dataclass
class Answer:
    """What a client has received."""

    request_id: str  # the id that the client gave
    client: tuple[str, int] = ("", 0)  # the address of the client's socket
    server: tuple[str, int] = ("", 0)  # the address that it is connected to
    status: int = 0  # of the HTTP response
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = ""  # of a response that is not a stream
    # By index.
    choices: defaultdict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    usage: dict[str, Any] | None = None  # the last one that was told
    error: dict[str, Any] | None = None  # the error event's contents
    comments: list[str] = field(default_factory=list)  # the comments without pings, in order
    # The number of tokens received when the stream told of each move.
    lost_at: list[int] = field(default_factory=list)
    moved_at_s: list[float] = field(default_factory=list)  # when it told so, by the monotonic clock
    # The ids, times, models and fingerprints of the chunks.
    heads: set[tuple[Any, ...]] = field(default_factory=set)
    num_done: int = 0  # how often `[DONE]` came
    longest_gap_s: float = 0.0  # the longest time without an event between two events
    last_event_id: str = ""  # the id of the last event that had one
    _next_id: str = ""
    _last_event_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of all choices so far."""
        return 0 if self.usage is None else int(self.usage["completion_tokens"])

    @property
    def is_whole(self) -> bool:
        """Whether the answer ended with one `[DONE]` and without an error."""
        return (self.status, self.num_done, self.error) == (200, 1, None)

    @property
    def essence(self) -> object:
        """All that must not depend on what happened to replicas."""
        assert self.is_whole, (self.request_id, self.status, self.num_done, self.error, self.body)
        assert len(self.heads) == 1, self.heads
        usage = dict(self.usage or {})
        for name in CACHE_FIELDS:
            usage.pop(name, None)
        return dict(self.choices), usage

    def take(self, line: str) -> None:
        """Add a line of the stream."""
        if line.startswith(":"):
            self._take_comment(line[1:].strip())
        elif line.startswith("id: "):
            self._next_id = line.removeprefix("id: ")
        elif line == "data: [DONE]":
            self.num_done += 1
        elif line.strip():  # a ping may be a space
            assert self.num_done == 0, "an event came after [DONE]"
            self._take_chunk(json.loads(line.removeprefix("data: ")))
            self.last_event_id, self._next_id = self._next_id or self.last_event_id, ""

    def _take_comment(self, comment: str) -> None:
        if comment == "moved":
            self.lost_at.append(self.num_tokens)
            self.moved_at_s.append(time.monotonic())
        if comment != "ping":
            self.comments.append(comment)

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        now_s = time.monotonic()
        if self._last_event_s is not None:
            self.longest_gap_s = max(self.longest_gap_s, now_s - self._last_event_s)
        self._last_event_s = now_s
        if "error" in chunk:
            self.error = chunk["error"]
            return
        names = ("id", "object", "created", "model", "system_fingerprint")
        self.heads.add(tuple(chunk[name] for name in names))
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.choices[choice["index"]].gain(choice)


def assert_equal(answers: Sequence[Answer], expected: Sequence[Answer]) -> None:
    """Fail, and name the first difference, unless answers are whole and equal to others."""
    for answer, other in zip(answers, expected, strict=True):
        if answer.essence != other.essence:
            pytest.fail(
                f"{answer.request_id}, lost at {answer.lost_at}: {_difference(answer, other)}"
            )


def _difference(answer: Answer, expected: Answer) -> str:
    for index, choice in expected.choices.items():
        found = answer.choices[index]
        for name in ("text", "calls", "finish_reason"):
            if getattr(found, name) != getattr(choice, name):
                return f"{name}: {getattr(found, name)!r} is not {getattr(choice, name)!r}"
        for at, pair in enumerate(zip_longest(found.logprobs, choice.logprobs)):
            if pair[0] != pair[1]:
                return f"logprobs of token {at}: {pair[0]} is not {pair[1]}"
    return f"usage: {answer.usage} is not {expected.usage}"


class Stream:
    """An open stream; it is read only as far as a test asks."""

    def __init__(self, lines: AsyncIterator[str], answer: Answer) -> None:
        self._lines = lines
        self.answer = answer

    async def read_tokens(self, num_tokens: int) -> None:
        """Read until this many tokens have come; fail if the stream ends first."""
        while self.answer.num_tokens < num_tokens:
            await self._read_line()

    async def read_comment(self, comment: str) -> None:
        """Read until a comment has come; fail if the stream ends first."""
        while comment not in self.answer.comments:
            await self._read_line()

    async def _read_line(self) -> None:
        line = await anext(self._lines, None)
        assert line is not None, f"the stream has ended: {self.answer.error}"
        self.answer.take(line)

    async def read_to_end(self) -> Answer:
        """Read what is left; return all of it."""
        async for line in self._lines:
            self.answer.take(line)
        return self.answer

    async def outcome(self) -> Answer | httpx.TransportError:
        """Return the whole answer, or the error that its client sees, who gets no `[DONE]` then."""
        try:
            return await self.read_to_end()
        except httpx.TransportError as error:
            assert (self.answer.num_done, self.answer.error) == (0, None)
            return error


@asynccontextmanager
async def opened(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    path: str = "/v1/chat/completions",
    request_id: str | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> AsyncIterator[Stream]:
    """Open a stream whose chunks tell their numbers of tokens."""
    answer = Answer(request_id or uuid4().hex)
    told = {"stream": True, "stream_options": COUNTED, **body}
    headers = {"X-Request-Id": answer.request_id, **headers}
    async with client.stream("POST", path, json=told, headers=headers) as response:
        socket = response.extensions["network_stream"]
        answer.client = socket.get_extra_info("client_addr")
        answer.server = socket.get_extra_info("server_addr")
        answer.status, answer.headers = response.status_code, response.headers
        if response.status_code != 200:
            answer.body = (await response.aread()).decode()
        yield Stream(response.aiter_lines(), answer)


async def read(
    client: httpx.AsyncClient,
    body: Mapping[str, Any],
    path: str = "/v1/chat/completions",
    request_id: str | None = None,
) -> Answer:
    """Open a stream and read it to its end."""
    async with opened(client, body, path, request_id) as stream:
        return await stream.read_to_end() if stream.answer.status == 200 else stream.answer


@asynccontextmanager
async def slow_streams(
    client: httpx.AsyncClient,
    bodies: Sequence[Mapping[str, Any]],
    name: str,
    how: Literal["slow", "held"] = "slow",
) -> AsyncIterator[list[Stream]]:
    """Open a stream for each body, whose steps `FragileGenerator` slows down; all have begun.

    `name` is part of the requests' ids, and new to the server; `how` says whether the steps are
    slow to the end, or until a test releases the name.
    """
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(opened(client, body, request_id=f"{how}-{name}-{i}"))
            for i, body in enumerate(bodies)
        ]
        await asyncio.gather(*(stream.read_tokens(1) for stream in streams))
        yield streams
