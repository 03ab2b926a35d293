"""The shapes of errors: OpenAI's, Anthropic's below `/v1/messages`, Cohere's at `/v2/rerank`.

The path decides, so that also an error before the route, such as a missing key, has the shape that
the client reads.

Source: https://docs.claude.com/en/api/errors, https://docs.cohere.com/reference/errors
"""

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from pydantic import BaseModel

ANTHROPIC_PATH: Final = "/v1/messages"
COHERE_PATH: Final = "/v2/rerank"
ANTHROPIC_ID_HEADER: Final = "request-id"
"""Where Anthropic's clients look for the request's id."""

AnthropicErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]

_ANTHROPIC_TYPES: Final[dict[int, AnthropicErrorType]] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.GATEWAY_TIMEOUT: "timeout_error",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """What an error says, in any shape.

    Attributes:
        status: The HTTP status.
        message: What is wrong and how to mend it.
        type: OpenAI's error type.
        param: The request's field at fault, if there is one.
        code: A name for programs.
    """

    status: int
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """What went wrong."""

    type: AnthropicErrorType
    message: str


class MessagesErrorBody(BaseModel):
    """The body of every error below `/v1/messages`, and of the event `error` of its streams."""

    type: Literal["error"]
    error: MessagesErrorDetail
    request_id: str | None


class RerankErrorBody(BaseModel):
    """The body of every error at `/v2/rerank`."""

    id: str | None
    message: str


ErrorShape = Callable[[Fault, str | None], dict[str, Any]]
"""Makes the JSON of an error; the text is the request's id."""


def openai_error(fault: Fault, request_id: str | None) -> dict[str, Any]:
    """Return an error as OpenAI's API tells it."""
    return {
        "error": {
            "message": fault.message,
            "type": fault.type,
            "param": fault.param,
            "code": fault.code,
        }
    }


def anthropic_error(fault: Fault, request_id: str | None) -> dict[str, Any]:
    """Return an error as Anthropic's API tells it."""
    detail = {"type": _anthropic_type(fault), "message": fault.message}
    return {"type": "error", "error": detail, "request_id": request_id}


def cohere_error(fault: Fault, request_id: str | None) -> dict[str, Any]:
    """Return an error as Cohere's API tells it."""
    return {"id": request_id, "message": fault.message}


def _anthropic_type(fault: Fault) -> AnthropicErrorType:
    if fault.type == "overloaded_error":
        return "overloaded_error"
    other: AnthropicErrorType = "invalid_request_error" if fault.status < 500 else "api_error"
    return _ANTHROPIC_TYPES.get(fault.status, other)


def error_shape_of(path: str) -> ErrorShape:
    """Return the shape of errors at a path, given without Serve's route prefix."""
    if path == COHERE_PATH:
        return cohere_error
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    return anthropic_error if is_anthropic else openai_error
