"""What /openapi.json says of the answers, true to the wire."""

from typing import Any

from serve_app.api.errors import ErrorBody

Responses = dict[int | str, dict[str, Any]]

_ERRORS: dict[int | str, str] = {
    400: "The body is not JSON, or a field is unknown, unsupported or out of bounds.",
    401: "No API key, or one that is not known; only where the server asks for keys.",
    404: "No such model, or no such route.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not declared to be JSON.",
    429: "The API key has used up its limits. Retry-After says when to come back.",
    431: "The headers are too large.",
    500: "The server has failed at this request.",
    503: "A replica is overloaded, loading or gone. Retry-After says when to come back.",
    504: "The first token, the next one or the whole answer did not come in time.",
    "default": "Any other error.",
}

_ANYWHERE = (401, 408, 429, 431)
"""What the door may answer, whatever was asked for."""


def errors(*statuses: int) -> Responses:
    """Return the documentation of errors; `default` keeps FastAPI from adding its own 422."""
    keys: tuple[int | str, ...] = (*sorted({*statuses, *_ANYWHERE}), "default")
    return {key: {"model": ErrorBody, "description": _ERRORS[key]} for key in keys}


def event_stream(description: str, example: str) -> Responses:
    """Return the documentation of a 200 that is a stream if the request asked for one."""
    events = {"schema": {"type": "string"}, "example": example}
    return {200: {"description": description, "content": {"text/event-stream": events}}}
