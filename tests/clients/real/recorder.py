"""A proxy between a client and the server, which keeps what the client sends.

The embedded model calls no tool of its own accord. So the proxy demands a call from the server
where a client offers tools, leaves the choice to the model and has no result yet. The recording
holds the client's own body.
"""

import json
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

from benchmarks.free_port import free_port

METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]
PASSED_ON = {"accept", "authorization", "content-type", "user-agent"}
GIVEN_BACK = {"content-type", "x-request-id", "retry-after", "x-should-retry"}


@dataclass(frozen=True, slots=True)
class Recorded:
    """A request as a client sent it.

    Attributes:
        step: The step of the client's script that sent it.
        method: GET, POST and so on.
        path: The path with its query.
        body: The parsed JSON; None if the request had no body.
    """

    step: str
    method: str
    path: str
    body: Any

    def line(self) -> str:
        """Return the request as a line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)


def demanding_a_call(body: Any) -> Any:
    """Return the body with `tool_choice: required` if the model should call a tool now."""
    if not isinstance(body, dict) or not body.get("tools"):
        return body
    if _has_result(body) or body.get("tool_choice") not in (None, "auto"):
        return body
    return {**body, "tool_choice": "required"}


def _has_result(body: dict[str, Any]) -> bool:
    """Return whether the conversation holds a tool's result, as chats or as responses hold it."""
    messages, items = body.get("messages", []), body.get("input", [])
    return any(message.get("role") == "tool" for message in messages) or (
        isinstance(items, list)
        and any(item.get("type") == "function_call_output" for item in items)
    )


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
        async with httpx.AsyncClient(base_url=self._server_url, timeout=120) as self._client:
            yield

    async def _begin_step(self, request: Request) -> Response:
        self._step = request.path_params["name"]
        return Response()

    async def _pass_on(self, request: Request) -> Response:
        sent = await request.body()
        body = json.loads(sent) if sent else None
        changed = demanding_a_call(body)
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
    recorder, port = Recorder(server_url), free_port()
    server = uvicorn.Server(uvicorn.Config(recorder.app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", recorder
    finally:
        server.should_exit = True
        thread.join()
