"""A server that answers as a test says."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

Write = Callable[[bytes], Awaitable[None]]
Answering = Callable[[dict[str, Any], Write], Awaitable[None]]

MODELS: tuple[Mapping[str, Any], ...] = (
    {"id": "detector", "task": "classify"},
    {"id": "chat", "task": "generate"},
    {"id": "other", "task": "generate"},
)


def chunk(text: str = "", **more: Any) -> bytes:
    """Return the event of a chunk."""
    told = {name: more.pop(name) for name in ("reasoning_content",) if name in more}
    reason = more.pop("finish_reason", None)
    choice = {"index": 0, "delta": {"content": text, **told}, "finish_reason": reason}
    return framed({"id": "answer-1", "choices": [choice], **more})


def framed(payload: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(payload)}\n\n".encode()


def end(num_tokens: int, reason: str = "stop") -> bytes:
    """Return the last events of an answer."""
    usage = {"prompt_tokens": 5, "completion_tokens": num_tokens}
    last = framed({"id": "answer-1", "choices": [], "usage": usage})
    return chunk(finish_reason=reason) + last + b"data: [DONE]\n\n"


def says(*pieces: bytes) -> Answering:
    """Return an answer of these bytes."""

    async def answer(_: dict[str, Any], write: Write) -> None:
        for piece in pieces:
            await write(piece)

    return answer


def refuses(status: int, body: str, **headers: str) -> Answering:
    """Return a refusal."""

    async def answer(_: dict[str, Any], write: Write) -> None:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        raise RefusedError(web.Response(status=status, text=body, headers=named))

    return answer


class RefusedError(Exception):
    """Carries the response to send instead of a stream."""

    def __init__(self, response: web.Response) -> None:
        super().__init__(response)
        self.response = response


@asynccontextmanager
async def serving(
    answering: Answering, models: tuple[Mapping[str, Any], ...] = MODELS
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve on a free port; yield the URL, and the requests as they come."""
    seen: list[dict[str, Any]] = []

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": models})

    async def complete(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append({"authorization": request.headers.get("Authorization"), **body})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})

        async def write(piece: bytes) -> None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(piece)

        try:
            await answering(body, write)
        except RefusedError as refused:
            return refused.response
        except ConnectionResetError:
            seen.append({"left": True})
            raise
        return response

    app = web.Application()
    app.router.add_get("/v1/models", list_models)
    app.router.add_post("/v1/chat/completions", complete)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/"), seen
