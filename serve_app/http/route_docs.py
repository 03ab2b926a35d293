"""What `/openapi.json` says about answers: the one description of all errors, and streams."""

from typing import Any, Final

from pydantic import BaseModel

from serve_app.http.error_shapes import ErrorBody, MessagesErrorBody, RerankErrorBody
from serve_app.http.warning_header import MAX_LENGTH, WARNING_HEADER

Responses = dict[int | str, dict[str, Any]]

SCHEMA_REF: Final = "#/components/schemas/{model}"
ERROR_REF: Final = {"$ref": "#/components/responses/Error"}
MESSAGES_ERROR_REF: Final = {"$ref": "#/components/responses/MessagesError"}
RERANK_ERROR_REF: Final = {"$ref": "#/components/responses/RerankError"}
REQUEST_ID_REF: Final = {"X-Request-Id": {"$ref": "#/components/headers/RequestId"}}

REQUEST_ID: Final = {
    "description": "The request's id: the client's own, or a new one. The server's log names it.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
}

ERROR_CAUSES: Final[dict[int, str]] = {
    400: "The body is not JSON, or a field is unknown, unsupported or out of bounds.",
    401: "No API key, or one that is not known; only where the server asks for keys.",
    403: "The API key lacks a scope or has as many files as it may, the route needs keys on a "
    "server that others can reach, or the server keeps no files, batches and responses.",
    404: "No such model, file, batch, response or route.",
    405: "The route answers other methods, which Allow names.",
    408: "The body came too slowly.",
    409: "A stream can't be resumed: Last-Event-ID is of another answer. Or the state of the file, "
    "batch or response does not allow this.",
    413: "The body is too large.",
    415: "The body is not declared to be JSON, or a form where a file is sent, or is compressed.",
    429: "The API key has used up its limits. Retry-After says when to come back.",
    426: "The route speaks WebSocket, which was not asked for, or can't be spoken here or now.",
    431: "The headers are too large.",
    500: "The server has failed at this request.",
    503: "A replica is overloaded, loading or gone, or the store of files, batches and "
    "responses can't be used. Retry-After says when to come back.",
    504: "The first token, the next one or the whole answer did not come in time.",
}
"""The statuses of errors, on any route, and what they mean."""

_RETRY_AFTER: Final = {
    "description": "With 429 and 503: seconds after which a retry makes sense.",
    "schema": {"type": "integer", "minimum": 0},
}
_SHOULD_RETRY: Final = {
    "description": "false: the same request will fail again.",
    "schema": {"type": "string", "enum": ["false"]},
}

ERROR_RESPONSE: Final[dict[str, Any]] = {
    "description": "An error. Its message says what is wrong and how to mend it.\n\n"
    + "\n".join(f"- **{status}**: {cause}" for status, cause in ERROR_CAUSES.items()),
    "headers": {
        **REQUEST_ID_REF,
        "Retry-After": _RETRY_AFTER,
        "x-should-retry": _SHOULD_RETRY,
    },
    "content": {
        "application/json": {"schema": {"$ref": SCHEMA_REF.format(model=ErrorBody.__name__)}}
    },
}
"""The component that every operation refers to, but those of Anthropic's and Cohere's APIs."""

MESSAGES_ERROR_RESPONSE: Final = {
    **ERROR_RESPONSE,
    "content": {
        "application/json": {
            "schema": {"$ref": SCHEMA_REF.format(model=MessagesErrorBody.__name__)}
        }
    },
}
"""The component that the operations of Anthropic's API refer to."""

RERANK_ERROR_RESPONSE: Final = {
    **ERROR_RESPONSE,
    "content": {
        "application/json": {"schema": {"$ref": SCHEMA_REF.format(model=RerankErrorBody.__name__)}}
    },
}
"""The component that the operation of Cohere's API refers to."""

_WARNING: Final = {
    "description": "What the request asked for and the answer does not hold, if there is anything: "
    "keywords of a JSON schema that is not strict.",
    "schema": {"type": "string", "maxLength": MAX_LENGTH},
}


def event_stream(
    description: str, example: str, piece: type[BaseModel], error: type[BaseModel] = ErrorBody
) -> Responses:
    """Return the documentation of a 200 answer that is a stream if the request asked for one.

    Args:
        description: The answer in both its forms.
        example: A stream.
        piece: The model of an event's data, one of `api.docs.EVENT_MODELS`.
        error: The model of the event of an error, another one.
    """
    events = {"schema": _event(piece, error), "example": example}
    return {
        200: {
            "description": description,
            "headers": {WARNING_HEADER: _WARNING},
            "content": {"text/event-stream": events},
        }
    }


def _event(piece: type[BaseModel], error: type[BaseModel]) -> dict[str, Any]:
    """Return the schema of one event. OpenAPI before 3.2 describes a stream by it."""
    decoded = [{"$ref": SCHEMA_REF.format(model=model.__name__)} for model in (piece, error)]
    json_data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": decoded},
    }
    return {
        "type": "object",
        "title": "Event",
        "description": "A piece of the answer. The last event is [DONE], or an error.",
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, json_data]}},
        "required": ["data"],
    }
