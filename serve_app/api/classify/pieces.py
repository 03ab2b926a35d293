"""Cuts texts into pieces to classify, and computes a text's scores from the scores of its pieces.

A text that is not split has a single piece.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import fsum
from typing import Literal, TypeVar

from deployments.contract.errors import InvalidRequestError
from serve_app.api.body.limits import check_text_bytes, num_utf8_bytes
from serve_app.api.classify.splitter import Span, split
from serve_app.config import LimitsConfig

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A piece of a text.

    Attributes:
        text: The text that the model reads.
        span: The piece's place in its text.
    """

    text: str
    span: Span

    @property
    def weight(self) -> int:
        """The piece's weight in its text's scores: its length, or 0 if it is only white space."""
        return 0 if self.text.isspace() else len(self.text)


@dataclass(frozen=True, slots=True)
class TextPieces:
    """The pieces of several texts: `of_texts[i]` holds the pieces of text i, at least one."""

    of_texts: tuple[tuple[TextPiece, ...], ...]

    def __iter__(self) -> Iterator[TextPiece]:
        """Iterate over all pieces, text by text."""
        return (piece for pieces in self.of_texts for piece in pieces)

    def __len__(self) -> int:
        """Return the number of all pieces."""
        return sum(map(len, self.of_texts))

    def group(self, values: Iterable[T]) -> Iterator[tuple[tuple[TextPiece, ...], list[T]]]:
        """Yield each text's pieces with their values, given the values of all pieces in order."""
        values = iter(values)
        return ((pieces, list(islice(values, len(pieces)))) for pieces in self.of_texts)

    def place(self, index: int) -> tuple[int, TextPiece]:
        """Return (text index, piece) for an index among all pieces."""
        for text_index, pieces in enumerate(self.of_texts):
            if index < len(pieces):
                return text_index, pieces[index]
            index -= len(pieces)
        raise IndexError(index)


def whole_texts(texts: Sequence[str]) -> TextPieces:
    """Return each text as a single piece."""
    return TextPieces(tuple((TextPiece(text, Span(0, len(text))),) for text in texts))


def split_texts(
    texts: Sequence[str], max_chars: int, overlap: int, limits: LimitsConfig
) -> TextPieces:
    """Return the pieces of texts; see `split`.

    Raises:
        InvalidRequestError: The pieces exceed `max_num_pieces`, or `max_prompt_bytes` with their
            overlaps counted.
    """
    budget = _Budget(limits)
    return TextPieces(tuple(tuple(_pieces(text, max_chars, overlap, budget)) for text in texts))


def whole_scores(
    pieces: Sequence[TextPiece], scores: Sequence[Sequence[float]], how: Literal["mean", "max"]
) -> tuple[float, ...]:
    """Return a text's scores.

    Args:
        pieces: The text's pieces.
        scores: The scores of each piece, one for each label.
        how: mean weighs each piece by its length; max takes each label's highest score. Pieces of
            only white space don't count, unless the text has no others.
    """
    weights = [piece.weight for piece in pieces]
    if not any(weights):
        weights = [len(piece.text) for piece in pieces]
    by_label = zip(*scores, strict=True)
    if how == "max":
        return tuple(
            max(score for score, weight in zip(column, weights, strict=True) if weight)
            for column in by_label
        )
    total = sum(weights)
    return tuple(
        fsum(score * weight for score, weight in zip(column, weights, strict=True)) / total
        for column in by_label
    )


def _pieces(text: str, max_chars: int, overlap: int, budget: "_Budget") -> Iterator[TextPiece]:
    for span in split(text, max_chars, overlap):
        piece = TextPiece(text[span.start : span.end], span)
        budget.spend(piece.text)
        yield piece


class _Budget:
    """Counts the pieces of one request against its limits."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._limits = limits
        self._num_pieces = 0
        self._num_bytes = 0

    def spend(self, text: str) -> None:
        """Count a piece.

        Raises:
            InvalidRequestError: A limit is exceeded.
        """
        self._num_pieces += 1
        self._num_bytes += num_utf8_bytes(text)
        if self._num_pieces > self._limits.max_num_pieces:
            raise InvalidRequestError(
                f"The texts give more than {self._limits.max_num_pieces} pieces "
                "(limits.max_num_pieces). Raise max_chars, lower overlap, or send several "
                "requests.",
                "split",
            )
        check_text_bytes(self._num_bytes, self._limits, "pieces")
