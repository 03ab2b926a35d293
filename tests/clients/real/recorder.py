"""A proxy between a client and the server, which keeps what the client sends.

The embedded model calls no tool of its own accord. So the proxy demands a call from the server
where a client offers tools, leaves the choice to the model and has no result yet. The recording
holds the client's own body.
"""

import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.clients.real.isolation import DEADLINE_S

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]
PASSED_ON = {
    "accept",
    "anthropic-beta",
    "anthropic-version",
    "authorization",
    "content-type",
    "user-agent",
    "x-api-key",
}
HARMLESS = {"ListAgents", "get_goal", "glob"}
"""The tools of coding agents that a call is demanded of: their others run what a model says."""
GIVEN_BACK = {"content-type", "x-request-id", "retry-after", "x-should-retry"}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request as a client sent it."""

    step: str  # the step of the client's script that sent it
    method: str  # GET, POST and so on
    path: str  # the path with its query
    body: Any  # the parsed JSON; None if the request had no body

    def line(self) -> str:
        """Return the request as a line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)


def demanding_a_call(path: str, body: Any) -> Any:
    """Return the body with a choice that demands a call if the model should call a tool now."""
    if not isinstance(body, dict) or not body.get("tools"):
        return body
    choice = body.get("tool_choice")
    if _has_result(body) or choice not in (None, "auto", {"type": "auto"}):
        return body
    harmless = next((name for tool in body["tools"] if (name := _name_of(tool)) in HARMLESS), None)
    return {**body, "tool_choice": _demand(path, harmless)}


def _name_of(tool: dict[str, Any]) -> Any:
    """Return the name of an offered tool, which chats wrap in `function`."""
    return tool.get("function", tool).get("name")


def _demand(path: str, name: str | None) -> Any:
    """Return the choice of a tool, or of any tool for None, in the words of a surface."""
    if path.startswith("/v1/messages"):
        return {"type": "any"} if name is None else {"type": "tool", "name": name}
    if name is None:
        return "required"
    named = {"name": name}
    return {"type": "function", **(named if path == "/v1/responses" else {"function": named})}


def _has_result(body: dict[str, Any]) -> bool:
    """Return whether the conversation holds a tool's result, in the words of any surface."""
    items = body.get("input", [])
    said = [*body.get("messages", []), *(items if isinstance(items, list) else [])]
    return any(
        item.get("role") == "tool"
        or item.get("type") == "function_call_output"
        or any(_is_result(part) for part in item.get("content") or [])
        for item in said
    )


def _is_result(part: Any) -> bool:
    """Return whether a part of a turn's content, which may be a text, is a tool's result."""
    return isinstance(part, dict) and part.get("type") == "tool_result"


class Recorder:
    """Passes requests on to the server and keeps them."""

    def __init__(self, server_url: str) -> None:
        self.requests: list[Recorded] = []
        self._server_url = server_url
        self._step = ""
        self.app = Starlette(
            lifespan=self._lifespan,
            routes=[
                Route("/step/{name}", self._begin_step, methods=["POST"]),
                Route("/{path:path}", self._pass_on, methods=METHODS),
            ],
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=self._server_url, timeout=DEADLINE_S) as self._client:
            yield

    async def _begin_step(self, request: Request) -> Response:
        self._step = request.path_params["name"]
        return Response()

    async def _pass_on(self, request: Request) -> Response:
        sent = await request.body()
        body = json.loads(sent) if sent else None
        changed = demanding_a_call(request.url.path, body)
        answer = await self._client.send(
            self._client.build_request(
                request.method,
                request.url.path,
                params=request.url.query,
                headers={k: v for k, v in request.headers.items() if k in PASSED_ON},
                content=sent if changed is body else json.dumps(changed),
            ),
            stream=True,
        )
        path = httpx.URL(request.url.path, query=request.url.query.encode() or None)
        self.requests.append(Recorded(self._step, request.method, str(path), body))
        return StreamingResponse(
            answer.aiter_bytes(),
            answer.status_code,
            {k: v for k, v in answer.headers.items() if k in GIVEN_BACK},
            background=BackgroundTask(answer.aclose),
        )


@contextmanager
def recording(server_url: str) -> Iterator[tuple[str, Recorder]]:
    """Run a recorder in front of the server; yield its URL and itself."""
    recorder = Recorder(server_url)
    server = uvicorn.Server(uvicorn.Config(recorder.app, log_level="warning"))
    # It listens from here on, so that a client that is faster than the thread waits.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", recorder
        finally:
            server.should_exit = True
            thread.join()
