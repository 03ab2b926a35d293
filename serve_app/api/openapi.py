"""What /openapi.json says of the answers, true to the wire."""

from collections.abc import Sequence
from typing import Any, Final, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app.api.chunk_schema import ChatChunk, CompletionChunk
from serve_app.api.classify_schema import ClassifyBody, VllmClassifyBody
from serve_app.api.errors import ErrorBody
from serve_app.api.text_generation_schema import TextGenerationEvent

Responses = dict[int | str, dict[str, Any]]

ANSWER_ERRORS: Final = (400, 404, 413, 415, 500, 503, 504)
"""What may be answered where a body is read and a model is asked."""

READ_ERRORS: Final = (400, 500)
"""What may be answered to any request that is let in."""

_ERRORS: Final[dict[int | str, str]] = {
    400: "The body is not JSON, or a field is unknown, unsupported or out of bounds.",
    401: "No API key, or one that is not known; only where the server asks for keys.",
    404: "No such model, or no such route.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    415: "The body is not declared to be JSON, or is compressed.",
    429: "The API key has used up its limits. Retry-After says when to come back.",
    431: "The headers are too large.",
    500: "The server has failed at this request.",
    503: "A replica is overloaded, loading or gone. Retry-After says when to come back.",
    504: "The first token, the next one or the whole answer did not come in time.",
}

_ANYWHERE: Final = (401, 408, 429, 431)
"""What the door may answer, whatever was asked for."""

_REQUEST_ID: Final = {
    "description": "The request's name: the client's own, or a new one. The logs hold it.",
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
}
_RETRY_AFTER: Final = {
    "description": "Seconds after which a retry makes sense.",
    "schema": {"type": "integer", "minimum": 0},
}
_SHOULD_RETRY: Final = {
    "description": "false: the same request will fail again.",
    "schema": {"type": "string", "enum": ["false"]},
}

_REF: Final = "#/components/schemas/{model}"

PIECES: Final[tuple[type[BaseModel], ...]] = (ChatChunk, CompletionChunk, TextGenerationEvent)
"""What the events of streams hold; no route returns them, so FastAPI knows nothing of them."""

CLASSIFY_BODIES: Final = frozenset({ClassifyBody.__name__, VllmClassifyBody.__name__})
"""The schemas of those bodies whose `model` is one that classifies."""

FASTAPI_S_OWN: Final = ("HTTPValidationError", "ValidationError")
"""Schemas of an answer that no route gives: what a client sent wrongly is a 400 of ours."""


def errors(*statuses: int) -> Responses:
    """Return the documentation of errors."""
    return {
        status: {
            "model": ErrorBody,
            "description": _ERRORS[status],
            "headers": _headers_of(status),
        }
        for status in sorted({*statuses, *_ANYWHERE})
    }


def event_stream(description: str, example: str, piece: type[BaseModel]) -> Responses:
    """Return the documentation of a 200 that is a stream if the request asked for one.

    Args:
        description: Of the answer in both its forms.
        example: A stream.
        piece: What an event's data holds, one of `PIECES`.
    """
    events = {"schema": _event(piece), "example": example}
    return {200: {"description": description, "content": {"text/event-stream": events}}}


def _event(piece: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI before 3.2 takes the schema of a stream for: that of its events."""
    decoded = [{"$ref": _REF.format(model=model.__name__)} for model in (piece, ErrorBody)]
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


class DescribedApp(FastAPI):
    """An application whose description fits what this server serves."""

    def __init__(
        self, *, model_ids: Sequence[str], classifier_ids: Sequence[str] = (), **settings: Any
    ) -> None:
        """Keep the names of the models.

        Args:
            model_ids: What a request may ask for.
            classifier_ids: What one may ask for that wants texts classified.
            settings: FastAPI's own.
        """
        super().__init__(**settings)
        self._model_ids = list(model_ids)
        self._classifier_ids = list(classifier_ids)

    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's document, mended: made once."""
        if self.openapi_schema is None:
            document = super().openapi()
            for path in document["paths"].values():
                for operation in path.values():
                    _mend(operation["responses"])
            schemas = document["components"]["schemas"]
            schemas.update(_schemas_of_pieces())
            for name in FASTAPI_S_OWN:
                schemas.pop(name, None)
            for name, schema in schemas.items():
                if schema.get("additionalProperties") is False:
                    ids = self._classifier_ids if name in CLASSIFY_BODIES else self._model_ids
                    _name_models(schema.get("properties", {}).get("model", {}), ids)
        return super().openapi()


def _schemas_of_pieces() -> dict[str, Any]:
    pieces: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (piece, "validation") for piece in PIECES
    ]
    _, told = models_json_schema(pieces, ref_template=_REF)
    schemas: dict[str, Any] = told["$defs"]
    return schemas


def _headers_of(status: int) -> dict[str, Any]:
    if status in (429, 503):
        return {"Retry-After": _RETRY_AFTER}
    return {"x-should-retry": _SHOULD_RETRY} if status < 500 or status == 504 else {}


def _mend(responses: dict[str, Any]) -> None:
    responses.pop("422", None)
    for response in responses.values():
        response.setdefault("headers", {})["X-Request-Id"] = _REQUEST_ID


def _name_models(field: dict[str, Any], model_ids: list[str]) -> None:
    """Say in a body's field `model` which ones there are, if there are any."""
    if not model_ids:
        return
    for kind in field.get("anyOf", [field]):
        if kind.get("type") == "string":
            kind["enum"] = model_ids
