"""Asks the application's own routes without HTTP, as a batch does for each of its lines.

Such a request needs no key and is charged to no limits of one: its batch was let in, and has bounds
of its own. All the rest is a client's way: the record with its tokens, the line in the access log,
the span, the errors in the shape of the path. A response in the background is work of its own in
place of a route's.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any, Final

from fastapi import FastAPI
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract.telemetry.tracing import Tracer
from serve_app.http.exchange import Exchange
from serve_app.http.request_record import Meter, record_of
from serve_app.jobs.calls import Call, CallAnswer
from serve_app.jobs.response_runner import Work
from serve_app.middleware.access_log import AccessLogMiddleware
from serve_app.middleware.tracing import TracingMiddleware

BUG: Final = (500, Exception)
"""What an application's handler for bugs is registered as."""

logger = logging.getLogger("ray.serve")


class InProcessRoutes:
    """Answers calls by the routes of an application."""

    def __init__(
        self, app: FastAPI, *, writes_log: bool, meter: Meter, tracer: Tracer | None
    ) -> None:
        """Compose what such a call passes through.

        Args:
            app: The application, with all its routes.
            writes_log: Whether each call writes a line into the access log.
            meter: Counts the tokens of answers.
            tracer: Traces calls; None traces none.
        """
        handlers = dict(app.exception_handlers)
        on_bug = next((handlers.pop(each) for each in BUG if each in handlers), None)
        routes = ExceptionMiddleware(_Endpoints(app.router), handlers=handlers)
        guarded = ServerErrorMiddleware(routes, handler=on_bug)
        self._asgi: ASGIApp = AccessLogMiddleware(_Admitted(guarded), writes_log, meter=meter)
        if tracer is not None:
            self._asgi = TracingMiddleware(self._asgi, tracer)
        self._app = app

    async def __call__(self, call: Call) -> CallAnswer:
        """Return the answer. A bug of ours is logged and answered with a 500."""
        return await self._answer(call, self._scope(call))

    async def run(self, call: Call, work: Work) -> CallAnswer:
        """Do work in place of the call's route; an error of it is answered as a route's is."""
        scope = self._scope(call)
        scope["state"]["work"] = work
        scope["route"] = _WorkRoute(call.path)
        return await self._answer(call, scope)

    async def _answer(self, call: Call, scope: Scope) -> CallAnswer:
        exchange = Exchange(call.body)
        try:
            await self._asgi(scope, exchange.receive, exchange.send)
        except Exception:
            if exchange.status is None:
                raise
            logger.exception("the server has failed at %s", call.request_id)
        return _call_answer(exchange, lost_replicas=record_of(scope).num_deaths > 0)

    def _scope(self, call: Call) -> dict[str, Any]:
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": call.path,
            "raw_path": call.path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            "app": self._app,
            "state": {"request_id": call.request_id, "id_is_echoed": False, "call": call},
        }


@dataclass(frozen=True, slots=True)
class _WorkRoute:
    """What the access log names a call by that is answered by work."""

    path: str


class _Endpoints:
    """Does a call's work, if it has any, or lets a route answer."""

    def __init__(self, routes: ASGIApp) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work: Work | None = scope["state"].get("work")
        if work is None:
            await self._routes(scope, receive, send)
        else:
            await work()
            await Response()(scope, receive, send)


class _Admitted:
    """Notes in a call's record whose it is, as `AuthMiddleware` does for requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, call = record_of(scope), scope["state"]["call"]
        record.key_name, record.standing = call.key_name, call.standing
        await self._app(scope, receive, send)


def _call_answer(exchange: Exchange, *, lost_replicas: bool) -> CallAnswer:
    assert exchange.status is not None, "every route answers"
    body, code = exchange.body, None
    if exchange.status != 200:
        error = json.loads(body).get("error")
        code = error.get("code") if isinstance(error, dict) else None
    wait = exchange.headers.get("retry-after")
    retry_after_s = None if wait is None else float(wait)
    return CallAnswer(exchange.status, body, code, retry_after_s, lost_replicas)
