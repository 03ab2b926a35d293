"""The one place where errors become HTTP, and the error inside a stream.

Every error has OpenAI's shape. What a client sent wrongly is a 400 on every surface, with the name
of the parameter that is to blame; what went wrong here tells nothing of our insides.
"""

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from deployments.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    RaystreamError,
    ReplicaUnavailableError,
)
from serve_app.access_log import current_record
from serve_app.request_id import echo_headers

RETRY_AFTER_S = 1
"""What is told where nobody can know when there will be room."""

COME_BACK_STATUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
CLIENT_CLOSED_REQUEST = 499
MAX_ECHO = 256
"""Characters of a message and of a parameter's path, which both may hold a client's own words."""

VALIDATION_CODES = ("unknown_parameter", "unsupported_parameter", "invalid_combination")


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


def error_payload(error: RaystreamError) -> dict[str, Any]:
    """Return the JSON of an error, for a body or for an event in a stream."""
    return _payload(error.message, error.type, error.param, error.code)


def error_response(error: RaystreamError) -> JSONResponse:
    """Return the answer for an error of ours, with the headers that guide a client's retries."""
    return _answer(error_payload(error), error.status, _retry_headers(error))


def install_error_handlers(app: FastAPI) -> None:
    """Make every failure of the application answer in one shape."""
    app.add_exception_handler(RaystreamError, _on_raystream_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_client_disconnect)
    app.add_exception_handler(Exception, _on_unknown_error)


def _payload(message: str, type_: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def _answer(payload: dict[str, Any], status: int, headers: Mapping[str, str]) -> JSONResponse:
    """Return the answer, whose code the access log tells too."""
    record = current_record()
    if record is not None:
        record.refused(payload["error"]["code"])
    return JSONResponse(payload, status, headers)


def _retry_headers(error: RaystreamError) -> dict[str, str]:
    if error.status in COME_BACK_STATUSES:
        return {"Retry-After": str(ceil(error.retry_after_s or RETRY_AFTER_S))}
    # What took too long once would take as long again, and add to the load.
    is_final = error.status < 500 or isinstance(error, DeadlineExceededError)
    return {"x-should-retry": "false"} if is_final else {}


async def _on_raystream_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RaystreamError)
    # When a client leaves, Serve cancels the replica's call, and that may be told here first.
    if isinstance(error, ReplicaUnavailableError) and await request.is_disconnected():
        record = current_record()
        if record is not None:
            record.abandoned()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return error_response(error)


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    refusal = InvalidRequestError(first["msg"][:MAX_ECHO], _param(first, error.body))
    payload = error_payload(refusal)
    if first["type"] in VALIDATION_CODES:
        payload["error"]["code"] = first["type"]
    return _answer(payload, refusal.status, _retry_headers(refusal))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = HTTPStatus(error.status_code).phrase
    headers = {**(error.headers or {}), "x-should-retry": "false"}
    asked_for = f"{request.method} {request.url.path[:MAX_ECHO]}"
    message = f"{reason}: {asked_for}. GET /docs shows all that is served."
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = _with_head(headers.get("Allow", "GET"))
        message = f"{reason}: {asked_for}. Send {headers['Allow']}."
    type_ = "invalid_request_error" if error.status_code < 500 else "server_error"
    payload = _payload(message, type_, None, reason.lower().replace(" ", "_"))
    return _answer(payload, error.status_code, headers)


def _with_head(methods: str) -> str:
    """Return the methods that a route takes; `HeadMiddleware` answers HEAD where GET stands."""
    return methods.replace("GET", "GET, HEAD") if "HEAD" not in methods else methods


async def _on_client_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _on_unknown_error(request: Request, error: Exception) -> Response:
    """Answer for a bug of ours. Starlette raises it again behind this, so the log gets it too."""
    response = error_response(RaystreamError("The server has failed at this request."))
    # This answer is made outside of our middleware.
    response.headers.update(echo_headers(request))
    return response


def _param(error: Mapping[str, Any], body: Any) -> str | None:
    """Return the way to the parameter, such as `messages[0].content`."""
    steps = _steps(error, body)
    field = error.get("ctx", {}).get("field")
    steps += [] if field is None else [field]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return path.removeprefix(".")[:MAX_ECHO] or None


def _steps(error: Mapping[str, Any], value: Any) -> list[int | str]:
    """Keep of pydantic's location what is in the body; the names of union members are not.

    They may be those of fields, too (`text`, `image_url`). So the way ends where the value stands
    that pydantic found wrong, if it is there as it came.
    """
    location: Sequence[int | str] = error["loc"][1:]
    steps: list[int | str] = []
    for index, step in enumerate(location):
        if value is error["input"]:
            return [*steps, location[-1]] if error["type"] == "missing" else steps
        if isinstance(value, list) and isinstance(step, int):
            steps.append(step)
            value = value[step]
        elif isinstance(value, dict) and (step in value or index + 1 == len(location)):
            steps.append(step)
            value = value.get(step)
    return steps
