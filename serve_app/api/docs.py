"""The API's own documentation: /openapi.json, matched to the real answers, and the page `/docs`.

The page is Swagger UI, served from here. It loads nothing from elsewhere, so it works without the
internet and no other host learns that it was opened. Its Content-Security-Policy forbids all other
sources, whatever text a description holds.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles

from serve_app.api.batches.schema import BatchRequest
from serve_app.api.chat.schema import ChatChunk
from serve_app.api.classify.schema import ClassifyBody, VllmClassifyBody
from serve_app.api.completions.schema import CompletionChunk
from serve_app.api.embeddings.schema import EmbeddingsBody
from serve_app.api.examples import EXAMPLES
from serve_app.api.messages.schema import MessagesEvent
from serve_app.api.rerank.schema import RerankBody
from serve_app.api.responses.answer_schema import ResponsesEvent
from serve_app.api.score.schema import ScoreBody
from serve_app.api.text_generation.schema import TextGenerationEvent
from serve_app.http.error_shapes import (
    ErrorBody,
    ErrorShape,
    MessagesErrorBody,
    RerankErrorBody,
    anthropic_error,
    cohere_error,
    error_shape_of,
    openai_error,
)
from serve_app.http.page_headers import PAGE_HEADERS
from serve_app.http.route_docs import (
    ERROR_REF,
    ERROR_RESPONSE,
    MESSAGES_ERROR_REF,
    MESSAGES_ERROR_RESPONSE,
    REQUEST_ID,
    REQUEST_ID_REF,
    RERANK_ERROR_REF,
    RERANK_ERROR_RESPONSE,
    SCHEMA_REF,
)

EVENT_MODELS: Final[tuple[type[BaseModel], ...]] = (
    ChatChunk,
    CompletionChunk,
    TextGenerationEvent,
    ResponsesEvent,
    MessagesEvent,
    ErrorBody,
    MessagesErrorBody,
    RerankErrorBody,
)
"""The models of the events in streams. No route returns one, so FastAPI does not list them."""

CLASSIFY_BODIES: Final = frozenset({ClassifyBody.__name__, VllmClassifyBody.__name__})
"""Names of the bodies whose `model` is a classifier."""

JOB_BODIES: Final = frozenset({BatchRequest.__name__})
"""Names of the bodies that name no model."""

COMPARE_BODIES: Final = frozenset({RerankBody.__name__, ScoreBody.__name__})
"""Names of the bodies whose `model` compares texts."""

ERROR_REFS: Final[Mapping[ErrorShape, Mapping[str, str]]] = {
    openai_error: ERROR_REF,
    anthropic_error: MESSAGES_ERROR_REF,
    cohere_error: RERANK_ERROR_REF,
}
"""The component that describes errors of each shape."""

UNUSED_FASTAPI_SCHEMAS: Final = ("HTTPValidationError", "ValidationError")
"""Schemas of FastAPI's 422 answer, which no route gives: here an invalid body is a 400."""

PAGE: Final = Path(__file__).parent / "docs_page"
"""The page's files. `make vendor` writes those of Swagger UI."""


class DescribedApp(FastAPI):
    """An application whose OpenAPI document matches what the server answers."""

    def __init__(
        self,
        *,
        model_ids: Sequence[str],
        classifier_ids: Sequence[str] = (),
        embedder_ids: Sequence[str] = (),
        comparer_ids: Callable[[], Sequence[str]] = tuple,
        **settings: Any,
    ) -> None:
        """Prepare a document that lists these models.

        Args:
            model_ids: The models that generate.
            classifier_ids: The models that classify.
            embedder_ids: The models that embed.
            comparer_ids: Returns the models that compare texts; more become known as they load.
            settings: FastAPI's own settings.
        """
        super().__init__(**settings)
        self._model_ids = list(model_ids)
        self._classifier_ids = list(classifier_ids)
        self._embedder_ids = list(embedder_ids)
        self._ask_comparer_ids = comparer_ids
        self._comparer_ids: list[str] = []

    def openapi(self) -> dict[str, Any]:
        """Return FastAPI's document, corrected on the first call and when more models are known.

        It leaves out the operations that no served model can answer.
        """
        comparer_ids = list(self._ask_comparer_ids())
        if comparer_ids != self._comparer_ids:
            self._comparer_ids, self.openapi_schema = comparer_ids, None
        if self.openapi_schema is None:
            document = super().openapi()
            document["paths"] = {
                path: operations
                for path, operations in document["paths"].items()
                if all(map(self._ids_for, operations.values()))
            }
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    _correct(path, operation["responses"])
                    _add_examples(path, operation, self._ids_for(operation)[0])
            components = document["components"]
            components["responses"] = {
                "Error": ERROR_RESPONSE,
                "MessagesError": MESSAGES_ERROR_RESPONSE,
                "RerankError": RERANK_ERROR_RESPONSE,
            }
            components["headers"] = {"RequestId": REQUEST_ID}
            schemas = components["schemas"]
            schemas.update(_event_schemas())
            for name in UNUSED_FASTAPI_SCHEMAS:
                schemas.pop(name, None)
            for name, schema in schemas.items():
                if schema.get("additionalProperties") is False:
                    _name_models(schema.get("properties", {}).get("model", {}), self._ids(name))
        return super().openapi()

    def _ids_for(self, operation: dict[str, Any]) -> list[str]:
        """Return the ids of the models that can answer an operation."""
        body = _body_of(operation)
        name = None if body is None else body["schema"]["$ref"].rpartition("/")[2]
        if name is None or name in JOB_BODIES:
            return self._model_ids + self._classifier_ids + self._embedder_ids
        return self._ids(name)

    def _ids(self, body: str) -> list[str]:
        """Return the ids of the models that a body can name."""
        if body in CLASSIFY_BODIES:
            return self._classifier_ids
        if body in COMPARE_BODIES:
            return self._comparer_ids
        return self._embedder_ids if body == EmbeddingsBody.__name__ else self._model_ids


def _body_of(operation: dict[str, Any]) -> dict[str, Any] | None:
    body: dict[str, Any] | None
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    return body


def _add_examples(path: str, operation: dict[str, Any], model_id: str) -> None:
    """Add the bodies, and the ids in paths, that succeed with a model."""
    for parameter in operation.get("parameters", ()):
        if parameter["name"] == "model_id":
            parameter["example"] = model_id
    body = _body_of(operation)
    if body is not None and path in EXAMPLES:
        body["examples"] = {
            summary: {"summary": summary, "value": {"model": model_id, **fields}}
            for summary, fields in EXAMPLES[path].items()
        }


def _event_schemas() -> dict[str, Any]:
    models: list[tuple[type[BaseModel], Literal["validation"]]] = [
        (model, "validation") for model in EVENT_MODELS
    ]
    _, definitions = models_json_schema(models, ref_template=SCHEMA_REF)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


def _correct(path: str, responses: dict[str, Any]) -> None:
    responses.pop("422", None)
    for response in responses.values():
        response["headers"] = REQUEST_ID_REF | response.get("headers", {})
    responses["default"] = ERROR_REFS[error_shape_of(path)]


def _name_models(field: dict[str, Any], model_ids: list[str]) -> None:
    """List the served models in a body's field `model`, if there are any."""
    if not model_ids:
        return
    for kind in field.get("anyOf", [field]):
        if kind.get("type") == "string":
            kind["enum"] = model_ids


def install_docs(app: FastAPI) -> None:
    """Serve the page and the files that it loads."""
    app.add_api_route("/docs", _page, include_in_schema=False)
    app.mount("/docs", StaticFiles(directory=PAGE))


async def _page() -> FileResponse:
    return FileResponse(PAGE / "index.html", headers=dict(PAGE_HEADERS))
