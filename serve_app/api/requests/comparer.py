"""Asks a model how well texts fit: a cross-encoder reads them in pairs, an embedder one by one.

A cross-encoder's score is its one label's, and an embedder's the cosine of two vectors.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from deployments.contract.errors import RaystreamError
from deployments.contract.pooling import PooledText, PoolingOperation, PoolingRequest, TextPair
from serve_app.api.body.limits import check_text_bytes, num_utf8_bytes
from serve_app.api.requests.faulty_text import ALL_TEXTS, faulty_text, renamed
from serve_app.backends.models.catalog import ServedPooler
from serve_app.config import LimitsConfig
from serve_app.http.request_record import claim_of_request, note_operation, note_prompt

MAX_NUMBERS_AT_ONCE: Final = 2**16
"""Vectors with more numbers in all are compared on a thread: that takes a millisecond or more, and
every stream shares the event loop."""


@dataclass(frozen=True, slots=True)
class Texts:
    """One side of a comparison.

    Attributes:
        texts: At least one.
        param: The request's field that holds them.
        is_list: Whether the field is a list; errors then name the place in it.
        prompt: What an embedder reads before each of them.
    """

    texts: Sequence[str]
    param: str
    is_list: bool
    prompt: str = ""

    @property
    def prompted(self) -> tuple[str, ...]:
        """The texts as an embedder reads them."""
        return tuple(self.prompt + text for text in self.texts)

    def name_of(self, index: int) -> str:
        """Return the request's name of a text."""
        return f"{self.param}[{index}]" if self.is_list else self.param


@dataclass(frozen=True, slots=True)
class Comparison:
    """Texts to compare, the one side with the other.

    Attributes:
        request_id: Names the request in logs.
        operation: What the client asks for, as traces name it.
        firsts: One text, or as many as there are seconds.
        seconds: The other side.
        truncate: Whether to drop the end of what is too long for the model.
        max_num_tokens: The most tokens of a sequence; None: as many as the model reads.
        max_second_tokens: The most tokens to keep of each second text; None keeps all.
        priority: The priority that the request names; None means that of its API key, or 0.
    """

    request_id: str
    operation: PoolingOperation
    firsts: Texts
    seconds: Texts
    truncate: bool
    max_num_tokens: int | None = None
    max_second_tokens: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """How well the texts fit.

    Attributes:
        scores: One for each second text; higher is better.
        num_tokens: Tokens that the model has read.
    """

    scores: list[float]
    num_tokens: int


async def compare(model: ServedPooler, comparison: Comparison, limits: LimitsConfig) -> Compared:
    """Return the scores of texts.

    Args:
        model: An embedding model or a cross-encoder.
        comparison: The texts.
        limits: The bounds on one request.

    Raises:
        RaystreamError: The request was refused or has failed; it names the client's own fields.
    """
    if model.description.embedding is not None:
        answers = await _embed(model, comparison)
        num_firsts = len(comparison.firsts.texts)
        is_long = len(answers) * model.description.embedding.width > MAX_NUMBERS_AT_ONCE
        scores = (
            await asyncio.to_thread(_cosines, answers, num_firsts)
            if is_long
            else _cosines(answers, num_firsts)
        )
    else:
        answers = await _read_pairs(model, comparison, limits)
        scores = [answer.scores[0] for answer in answers]
    num_tokens = sum(answer.num_tokens for answer in answers)
    note_prompt(num_tokens)
    return Compared(scores, num_tokens)


def cosines(firsts: npt.NDArray[np.float32], seconds: npt.NDArray[np.float32]) -> list[float]:
    """Return the cosine of each pair of vectors.

    Args:
        firsts: [1, width] or [n, width].
        seconds: [n, width].
    """
    norms = np.sqrt(_products(firsts, firsts)) * np.sqrt(_products(seconds, seconds))
    found: list[float] = (_products(firsts, seconds) / np.maximum(norms, 1e-12)).tolist()
    return found


def _cosines(answers: Sequence[PooledText], num_firsts: int) -> list[float]:
    vectors = np.stack([answer.vector for answer in answers])
    return cosines(vectors[:num_firsts], vectors[num_firsts:])


def _products(
    one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Return the products of vectors row by row, without a copy of them in float64."""
    products: npt.NDArray[np.float64] = np.einsum(
        "...j,...j->...", one, other, dtype=np.float64, casting="same_kind"
    )
    return products


async def _embed(model: ServedPooler, comparison: Comparison) -> tuple[PooledText, ...]:
    """Return the vectors of the first texts, and then of the second."""
    firsts, seconds = comparison.firsts, comparison.seconds
    request = _request(comparison, firsts.prompted + seconds.prompted, len(firsts.texts))
    return await _ask(model, request, comparison, _names(firsts) + _names(seconds))


async def _read_pairs(
    model: ServedPooler, comparison: Comparison, limits: LimitsConfig
) -> tuple[PooledText, ...]:
    firsts, seconds = comparison.firsts.texts, comparison.seconds.texts
    if len(firsts) < len(seconds):
        firsts = [*firsts] * len(seconds)
    # A single first text is read once for each second one.
    num_bytes = sum(map(num_utf8_bytes, firsts)) + sum(map(num_utf8_bytes, seconds))
    check_text_bytes(num_bytes, limits, "pairs", comparison.seconds.param)
    pairs = tuple(TextPair(*each) for each in zip(firsts, seconds, strict=True))
    request = _request(comparison, pairs)
    return await _ask(model, request, comparison, _names(comparison.seconds))


def _request(
    comparison: Comparison, texts: tuple[str, ...] | tuple[TextPair, ...], num_whole: int = 0
) -> PoolingRequest:
    return PoolingRequest(
        comparison.request_id,
        texts,
        truncate=comparison.truncate,
        max_num_tokens=comparison.max_num_tokens,
        max_text_tokens=comparison.max_second_tokens,
        num_whole=num_whole,
        operation=comparison.operation,
        trace=note_operation(comparison.operation),
        claim=claim_of_request(comparison.priority),
    )


async def _ask(
    model: ServedPooler, request: PoolingRequest, comparison: Comparison, names: Sequence[str]
) -> tuple[PooledText, ...]:
    try:
        return await model.backend.send(request)
    except RaystreamError as error:
        index = faulty_text(error)
        if index is not None:
            raise renamed(error, names[index]) from None
        if error.param == ALL_TEXTS:
            raise renamed(error, comparison.seconds.param) from None
        raise


def _names(texts: Texts) -> list[str]:
    return [texts.name_of(index) for index in range(len(texts.texts))]
