"""The span of each POST request, from its arrival to the last byte of its answer.

It is made from the request's record, so it tells what the access log tells. Other methods
ask no model; probes and pages would only hide the requests that matter. The parent is the client's
own span, if its `traceparent` is valid; otherwise a trace begins here.
"""

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any, Final

from opentelemetry.trace import StatusCode
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from deployments.contract.errors import OverloadedError, RateLimitError
from deployments.contract.gen_ai_spans import (
    ERROR,
    FINISH_REASONS,
    INPUT_TOKENS,
    MODEL,
    OPERATION,
    OUTPUT_TOKENS,
    PROVIDER,
    PROVIDER_NAME,
    REFUSED,
    TIME_TO_FIRST,
)
from deployments.contract.telemetry.tracing import Span, SpanKind, TraceContext, Tracer
from serve_app.http.request_record import CLIENT_DISCONNECTED, RequestRecord, record_of

METHOD: Final = "POST"
REFUSALS: Final = (OverloadedError.code, RateLimitError.code)
"""Codes of errors that say that there was no room."""


class TracingMiddleware:
    """Starts a request's span, and ends it with what its record says."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        """Wrap an application.

        Args:
            app: The application. `AccessLogMiddleware` must be inside it.
            tracer: Starts the spans.
        """
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, within its span if its trace is recorded."""
        span = self._start(scope) if _is_traced(scope) else None
        if span is None:
            await self._app(scope, receive, send)
            return
        scope["state"]["span"] = span
        try:
            await self._app(scope, receive, send)
        finally:
            _end(span, record_of(scope))

    def _start(self, scope: Scope) -> Span | None:
        parent = client_context(Headers(scope=scope))
        return self._tracer.start(METHOD, SpanKind.SERVER, parent, {"http.request.method": METHOD})


def client_context(headers: Headers) -> TraceContext | None:
    """Return the context that a client has sent, valid or not; None if there is none.

    Source: https://www.w3.org/TR/trace-context-1/#trace-context-http-headers-format
    """
    parents = headers.getlist("traceparent")
    if len(parents) != 1:
        return None
    return TraceContext(parents[0], ",".join(headers.getlist("tracestate")))


def _is_traced(scope: Scope) -> bool:
    return bool(scope["type"] == "http" and scope["method"] == METHOD)


def _end(span: Span, record: RequestRecord) -> None:
    if record.error_code in REFUSALS:
        span.add_event(REFUSED, {ERROR: record.error_code})
    if record.route is not None:
        span.update_name(f"{METHOD} {record.route}")
    span.set_attributes(dict(_attributes(record)))
    if _has_failed(record):
        span.set_status(StatusCode.ERROR)
    span.end()


def _attributes(record: RequestRecord) -> Iterator[tuple[str, Any]]:
    yield "raystream.request.id", record.request_id
    if record.num_moves:
        yield "raystream.request.moves", record.num_moves
    if record.has_left:
        yield "raystream.request.client_left", True
    if record.route is not None:
        yield "http.route", record.route
    if record.status is not None:
        yield "http.response.status_code", record.status
    if record.error_code is not None:
        yield ERROR, record.error_code
    if record.model is not None:
        yield MODEL, record.model
    if record.operation is None:
        return
    yield OPERATION, record.operation
    yield PROVIDER, PROVIDER_NAME
    yield INPUT_TOKENS, record.num_prompt_tokens
    yield OUTPUT_TOKENS, record.num_completion_tokens
    if record.first_token_s is not None:
        yield TIME_TO_FIRST, record.first_token_s - record.started_s
    if record.finish_reason not in (None, CLIENT_DISCONNECTED):
        yield FINISH_REASONS, (record.finish_reason,)


def _has_failed(record: RequestRecord) -> bool:
    """Return whether the server has failed; an error after the headers is always its own."""
    if record.status is None:
        return False
    return record.status >= 500 or (
        record.status == HTTPStatus.OK and record.error_code is not None
    )
