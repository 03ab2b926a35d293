"""The one place where errors become HTTP answers, or error events in a stream.

Every error has the shape of its path's API; see `error_shapes`. A client's mistake is a 400 on
every surface, with the name of the parameter at fault. An error of ours reveals no internals.
"""

from collections.abc import Mapping
from http import HTTPStatus
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from deployments.contract.errors import (
    DeadlineExceededError,
    OverloadReason,
    RaystreamError,
    ReplicaUnavailableError,
    overload_reason,
)
from serve_app.http.error_shapes import ANTHROPIC_ID_HEADER, Fault, anthropic_error, openai_error
from serve_app.http.request_id import echo_headers
from serve_app.http.request_record import RequestRecord, current_record
from serve_app.http.route_hints import path_of, route_hint, shown_path
from serve_app.http.validation_refusal import refusal_of, with_place

RETRY_AFTER_S = 1
"""The Retry-After to send when it is not known when there will be room."""

COME_BACK_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
CLIENT_CLOSED_REQUEST = 499


def error_payload(error: RaystreamError) -> dict[str, Any]:
    """Return the JSON of an error, for a body or for an event in a stream."""
    return _payload(_fault(error), current_record())


def error_response(error: RaystreamError, record: RequestRecord | None = None) -> JSONResponse:
    """Return the answer for an error, with the headers that guide a client's retries.

    Args:
        error: The error.
        record: The request's record; None means the current one.
    """
    return _answer(_fault(error), _retry_headers(error), overload_reason(error), record)


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of the application use the error shape of its path."""
    app.add_exception_handler(RaystreamError, _on_raystream_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_exception_handler(Exception, _on_unknown_error)


def _fault(error: RaystreamError) -> Fault:
    message = with_place(error.message, error.param)
    return Fault(error.status, message, error.type, error.param, error.code)


def _payload(fault: Fault, record: RequestRecord | None) -> dict[str, Any]:
    if record is None:
        return openai_error(fault, None)
    return record.error_shape(fault, record.request_id)


def _answer(
    fault: Fault,
    headers: Mapping[str, str],
    overload: OverloadReason | None = None,
    record: RequestRecord | None = None,
) -> JSONResponse:
    """Return the answer, and note in the request's record why it is an error."""
    record = record or current_record()
    answer = JSONResponse(_payload(fault, record), fault.status, headers)
    if record is not None:
        record.refused(fault.code, overload)
        if record.error_shape is anthropic_error:
            answer.headers[ANTHROPIC_ID_HEADER] = record.request_id
    return answer


def _retry_headers(error: RaystreamError) -> dict[str, str]:
    if error.status in COME_BACK_STATUSES:
        return {"Retry-After": str(ceil(error.retry_after_s or RETRY_AFTER_S))}
    # A request that took too long would take as long again, and add to the load.
    is_final = error.status < 500 or isinstance(error, DeadlineExceededError)
    return {"x-should-retry": "false"} if is_final else {}


async def _on_raystream_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RaystreamError)
    # When a client leaves, Serve cancels the replica's call; this error may arrive before the
    # disconnect does.
    if isinstance(error, ReplicaUnavailableError) and await request.is_disconnected():
        record = current_record()
        if record is not None:
            record.abandoned()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    found, validated = error.errors(), error.body
    if validated is None and found[0]["loc"][:1] == ("query",):  # a body may have a "query", too
        found = [{**each, "loc": each["loc"][1:]} for each in found]
        validated = dict(request.query_params)
    return error_response(refusal_of(found, validated))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = HTTPStatus(error.status_code).phrase
    headers = {**(error.headers or {}), "x-should-retry": "false"}
    path = path_of(request.scope)
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = _with_head(headers.get("Allow", "GET"))
        advice = f"Send {headers['Allow']}."
    else:
        meant = route_hint(path, request.app.routes)
        advice = "GET /docs shows all routes." if meant is None else f"Did you mean {meant}?"
    message = f"{reason}: {request.method} {shown_path(path)}. {advice}"
    type_ = "invalid_request_error" if error.status_code < 500 else "server_error"
    code = reason.lower().replace(" ", "_")
    return _answer(Fault(error.status_code, message, type_, None, code), headers)


def _with_head(methods: str) -> str:
    """Return the allowed methods, adding HEAD after GET because `HeadMiddleware` answers it."""
    return methods.replace("GET", "GET, HEAD") if "HEAD" not in methods else methods


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_unknown_error(request: Request, error: Exception) -> Response:
    """Answer for a bug of ours. Starlette then raises the error again, so it is logged too."""
    failed = RaystreamError("The server has failed at this request.")
    response = error_response(failed, request.scope["state"].get("request_record"))
    # This answer is made outside our middleware, which would add the request id.
    response.headers.update(echo_headers(request))
    return response
