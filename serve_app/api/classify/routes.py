"""`POST /v1/classify`: texts classified whole or in pieces. `POST /classify`: vLLM's shape."""

import asyncio
import re
from collections.abc import Callable, Sequence
from typing import Final

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from deployments.contract import Classification, ClassificationRequest
from deployments.errors import ContextLengthExceededError, RaystreamError
from serve_app.api.classify_schema import (
    DEFAULT_MAX_CHARS,
    Classifications,
    ClassifyBody,
    TextsBody,
    VllmClassification,
    VllmClassifications,
    VllmClassifyBody,
)
from serve_app.api.context import ApiContext
from serve_app.api.json_route import JsonRoute
from serve_app.api.openapi import ANSWER_ERRORS, errors
from serve_app.api.request_limits import check_texts
from serve_app.api.score_report import ScoreReport, check_num_scores
from serve_app.api.text_pieces import TextPieces, split_texts, whole_texts
from serve_app.api.usage import Usage
from serve_app.catalog import ServedClassifier
from serve_app.request_id import request_id_of

MAX_CHARS_AT_ONCE: Final = 2**14
"""Longer texts, with what their pieces repeat, are split on a thread: it takes up to half a
microsecond a character, and the event loop is every stream's."""

MAX_SCORES_AT_ONCE: Final = 2**10
"""Answers of more scores are written on a thread, for the same reason."""

_WHOLE_ADVICE: Final = (
    f' Send "split": {{"max_chars": {DEFAULT_MAX_CHARS}}} to have it classified in pieces, or '
    '"truncate": true to have its end dropped.'
)
_VLLM_ADVICE: Final = " Send truncate_prompt_tokens: -1 to have its end dropped."
_PIECE_ADVICE: Final = (
    ' Send a smaller split.max_chars, or "truncate": true to have the end of such pieces dropped.'
)


class ClassifyApi:
    """Classifies texts."""

    def __init__(self, context: ApiContext) -> None:
        """Keep what every surface is given."""
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
            responses=errors(*ANSWER_ERRORS),
        )
        router.add_api_route(
            "/classify",
            self.classify_as_vllm,
            methods=["POST"],
            response_model=VllmClassifications,
            summary="Classify texts, in vLLM's shape",
            responses=errors(*ANSWER_ERRORS),
        )
        return router

    async def classify(self, body: ClassifyBody, request: Request) -> Response:
        """Classify each text, whole or in pieces."""
        model = await self._context.find_classifier(body.model)
        pieces = await self._pieces(body)
        report = ScoreReport(model.description.labels, body.top_k, body.split)
        num_scores = report.check_size(pieces)
        try:
            answers = await self._ask(model, pieces, body.truncate is True, request)
        except RaystreamError as error:
            raise _told_of(error, pieces, body) from None
        return await _written(
            lambda: Classifications(
                id=f"classify-{request_id_of(request)}",
                created=int(self._context.clock.unix_s()),
                model=model.description.id,
                data=report.of_texts(pieces, answers),
                usage=_usage(answers),
            ),
            num_scores,
        )

    async def classify_as_vllm(self, body: VllmClassifyBody, request: Request) -> Response:
        """Classify each text."""
        model = await self._context.find_classifier(body.model)
        check_texts(body.texts, self._context.limits)
        pieces = whole_texts(body.texts)
        labels = model.description.labels
        num_scores = check_num_scores(len(pieces) * len(labels), "input")
        length = body.truncate_prompt_tokens
        max_num_tokens = None if length == -1 else length
        try:
            answers = await self._ask(model, pieces, length is not None, request, max_num_tokens)
        except RaystreamError as error:
            raise _told_of(error, pieces, body) from None
        return await _written(
            lambda: VllmClassifications(
                id=f"classify-{request_id_of(request)}",
                created=int(self._context.clock.unix_s()),
                model=model.description.id,
                data=[_vllm_s(index, answer, labels) for index, answer in enumerate(answers)],
                usage=_usage(answers),
            ),
            num_scores,
        )

    async def _pieces(self, body: ClassifyBody) -> TextPieces:
        limits, options = self._context.limits, body.split
        check_texts(body.texts, limits)
        if options is None:
            return whole_texts(body.texts)
        arguments = body.texts, options.num_chars, options.num_repeated, limits
        num_new = options.num_chars - options.num_repeated  # of each piece
        if sum(map(len, body.texts)) * options.num_chars > MAX_CHARS_AT_ONCE * num_new:
            return await asyncio.to_thread(split_texts, *arguments)
        return split_texts(*arguments)

    async def _ask(
        self,
        model: ServedClassifier,
        pieces: TextPieces,
        truncate: bool,
        request: Request,
        max_num_tokens: int | None = None,
    ) -> tuple[Classification, ...]:
        texts = tuple(piece.text for piece in pieces)
        asked = ClassificationRequest(request_id_of(request), texts, truncate, max_num_tokens)
        return await self._context.classify(model, asked)


async def _written(make: Callable[[], BaseModel], num_scores: int) -> Response:
    """Return an answer of so many scores as JSON."""

    def write() -> str:
        return make().model_dump_json()

    text = await asyncio.to_thread(write) if num_scores > MAX_SCORES_AT_ONCE else write()
    return Response(text, media_type="application/json")


def _usage(answers: Sequence[Classification]) -> Usage:
    return Usage.of(sum(answer.num_tokens for answer in answers), 0, 0)


def _vllm_s(index: int, answer: Classification, labels: Sequence[str]) -> VllmClassification:
    scores = answer.probabilities
    return VllmClassification(
        index=index,
        label=labels[scores.index(max(scores))],
        probs=list(scores),
        num_classes=len(scores),
    )


def _told_of(error: RaystreamError, pieces: TextPieces, body: TextsBody) -> RaystreamError:
    """Return what a replica says of a text in the request's own words: it knows pieces alone."""
    named = re.fullmatch(r"input\[(\d+)\]", error.param or "")
    if named is None:
        return error
    index, piece = pieces.place(int(named[1]))
    is_split = isinstance(body, ClassifyBody) and body.split is not None
    message = error.message
    if is_split:
        message += f" It is the piece from {piece.span.start} to {piece.span.end}."
    if isinstance(error, ContextLengthExceededError):
        whole_advice = _WHOLE_ADVICE if isinstance(body, ClassifyBody) else _VLLM_ADVICE
        message += _PIECE_ADVICE if is_split else whole_advice
    return type(error)(message, "input" if isinstance(body.input, str) else f"input[{index}]")
