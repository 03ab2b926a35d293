"""`POST /v1/classify`: classifies texts, whole or in pieces. `POST /classify`: vLLM's shape."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from deployments.contract.errors import ContextLengthExceededError, RaystreamError
from deployments.contract.pooling import PooledText, PoolingRequest
from serve_app.api.body.limits import check_texts
from serve_app.api.classify.pieces import TextPieces, split_texts, whole_texts
from serve_app.api.classify.schema import (
    DEFAULT_MAX_CHARS,
    Classifications,
    ClassifyBody,
    TextsBody,
    VllmClassification,
    VllmClassifications,
    VllmClassifyBody,
)
from serve_app.api.classify.scores import ScoreReport, check_num_scores
from serve_app.api.openai.text_schema import max_num_tokens_of
from serve_app.api.openai.usage import Usage
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.faulty_text import faulty_text
from serve_app.backends.models.catalog import ServedPooler
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of
from serve_app.http.request_record import claim_of_request, note_operation, note_prompt

MAX_CHARS_AT_ONCE: Final = 2**14
"""Longer texts, counted with the overlap of their pieces, are split on a thread. Splitting takes up
to half a microsecond a character, and every stream shares the event loop."""

MAX_SCORES_AT_ONCE: Final = 2**10
"""Answers with more scores are serialized on a thread, for the same reason."""

_WHOLE_ADVICE: Final = (
    f' Send "split": {{"max_chars": {DEFAULT_MAX_CHARS}}} to classify it in pieces, or '
    '"truncate": true to drop its end.'
)
_VLLM_ADVICE: Final = " Send truncate_prompt_tokens: -1 to drop its end."
_PIECE_ADVICE: Final = (
    ' Send a smaller split.max_chars, or "truncate": true to drop the end of such pieces.'
)


class ClassifyApi:
    """Classifies texts."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["classification"])
        router.add_api_route(
            "/v1/classify",
            self.classify,
            methods=["POST"],
            response_model=Classifications,
            summary="Classify texts",
        )
        router.add_api_route(
            "/classify",
            self.classify_as_vllm,
            methods=["POST"],
            response_model=VllmClassifications,
            summary="Classify texts, in vLLM's shape",
        )
        return router

    async def classify(self, body: ClassifyBody, request: Request) -> Response:
        """Classify each text, whole or in pieces of bounded length."""
        return await _json_response(*await classified(self._context, body, request_id_of(request)))

    async def classify_as_vllm(self, body: VllmClassifyBody, request: Request) -> Response:
        """Classify each text as a whole; request and answer have vLLM's shape."""
        model = await self._context.models.find_classifier(body.model)
        check_texts(body.texts, self._context.limits)
        pieces = whole_texts(body.texts)
        labels = model.description.labels
        num_scores = check_num_scores(len(pieces) * len(labels), "input")
        length = body.truncate_prompt_tokens
        most = max_num_tokens_of(length)
        try:
            answers = await _ask(
                model, pieces, body, request_id_of(request), length is not None, most
            )
        except RaystreamError as error:
            raise _in_request_terms(error, pieces, body) from None
        return await _json_response(
            lambda: VllmClassifications(
                id=f"classify-{request_id_of(request)}",
                created=int(self._context.clock.unix_s()),
                model=model.description.id,
                data=[_in_vllm_shape(index, each, labels) for index, each in enumerate(answers)],
                usage=_usage(answers),
            ),
            num_scores,
        )


async def classified(
    context: ApiContext, body: ClassifyBody, request_id: str
) -> tuple[Callable[[], Classifications], int]:
    """Classify each text, whole or in pieces.

    Returns:
        What makes the answer, and how many scores it has: more than `MAX_SCORES_AT_ONCE` take so
        long that it should be called on a thread.

    Raises:
        RaystreamError: The request was refused, or no replica could take it.
    """
    model = await context.models.find_classifier(body.model)
    pieces = await _pieces(context, body)
    report = ScoreReport(model.description.labels, body.top_k, body.split)
    num_scores = report.check_size(pieces)
    try:
        answers = await _ask(model, pieces, body, request_id, body.truncate is True)
    except RaystreamError as error:
        raise _in_request_terms(error, pieces, body) from None

    def made() -> Classifications:
        return Classifications(
            id=f"classify-{request_id}",
            created=int(context.clock.unix_s()),
            model=model.description.id,
            data=report.of_texts(pieces, answers),
            usage=_usage(answers),
        )

    return made, num_scores


async def _pieces(context: ApiContext, body: ClassifyBody) -> TextPieces:
    limits, options = context.limits, body.split
    check_texts(body.texts, limits)
    if options is None:
        return whole_texts(body.texts)
    arguments = body.texts, options.num_chars, options.num_repeated, limits
    num_new = options.num_chars - options.num_repeated  # of each piece
    if sum(map(len, body.texts)) * options.num_chars > MAX_CHARS_AT_ONCE * num_new:
        return await asyncio.to_thread(split_texts, *arguments)
    return split_texts(*arguments)


async def _ask(
    model: ServedPooler,
    pieces: TextPieces,
    body: TextsBody,
    request_id: str,
    truncate: bool,
    max_num_tokens: int | None = None,
) -> tuple[PooledText, ...]:
    texts = tuple(piece.text for piece in pieces)
    asked = PoolingRequest(
        request_id,
        texts,
        truncate,
        max_num_tokens,
        trace=note_operation("classify"),
        claim=claim_of_request(body.priority),
    )
    answers = await model.backend.send(asked)
    note_prompt(sum(answer.num_tokens for answer in answers))
    return answers


async def _json_response(make: Callable[[], BaseModel], num_scores: int) -> Response:
    """Return an answer as JSON, made on a thread if it has many scores."""

    def write() -> str:
        return make().model_dump_json()

    text = await asyncio.to_thread(write) if num_scores > MAX_SCORES_AT_ONCE else write()
    return Response(text, media_type="application/json")


def _usage(answers: Sequence[PooledText]) -> Usage:
    return Usage.of(sum(answer.num_tokens for answer in answers), 0, 0)


def _in_vllm_shape(index: int, answer: PooledText, labels: Sequence[str]) -> VllmClassification:
    scores = answer.scores
    return VllmClassification(
        index=index,
        label=labels[scores.index(max(scores))],
        probs=list(scores),
        num_classes=len(scores),
    )


def _in_request_terms(error: RaystreamError, pieces: TextPieces, body: TextsBody) -> RaystreamError:
    """Return a replica's error in terms of the request's texts; the replica only knows pieces."""
    place = faulty_text(error)
    if place is None:
        return error
    index, piece = pieces.place(place)
    is_split = isinstance(body, ClassifyBody) and body.split is not None
    message = error.message
    if is_split:
        message += f" It is the piece from {piece.span.start} to {piece.span.end}."
    if isinstance(error, ContextLengthExceededError):
        whole_advice = _WHOLE_ADVICE if isinstance(body, ClassifyBody) else _VLLM_ADVICE
        message += _PIECE_ADVICE if is_split else whole_advice
    return type(error)(message, "input" if isinstance(body.input, str) else f"input[{index}]")
