"""Turns a classifier's probabilities into an answer's scores: labels with scores, best first."""

from collections.abc import Sequence
from typing import Final

from deployments.contract.errors import InvalidRequestError
from deployments.contract.pooling import PooledText
from serve_app.api.classify.pieces import TextPiece, TextPieces, whole_scores
from serve_app.api.classify.schema import ClassifiedPiece, ClassifiedText, LabelScore, SplitOptions

MAX_NUM_SCORES: Final = 2**16
"""Most scores in one answer. With a thousand labels, the scores of all pieces would fill a
gigabyte, and serializing them as JSON holds up every stream, whichever thread does it."""


class ScoreReport:
    """Writes scores in the form that one request asks for."""

    def __init__(
        self, labels: Sequence[str], top_k: int | None, split: SplitOptions | None
    ) -> None:
        """Prepare to report in the form that the request asks for.

        Args:
            labels: In the order of the model's probabilities.
            top_k: How many labels are reported; None reports all.
            split: How the texts were split; None if they are whole.
        """
        self._labels = labels
        self._num_reported = min(top_k or len(labels), len(labels))
        self._split = split

    def check_size(self, pieces: TextPieces) -> int:
        """Return how many scores an answer will hold; refuse too many before the model is asked.

        Raises:
            InvalidRequestError: It would hold more than `MAX_NUM_SCORES`.
        """
        return check_num_scores(len(pieces) * self._num_reported, "top_k")

    def of_texts(self, pieces: TextPieces, answers: Sequence[PooledText]) -> list[ClassifiedText]:
        """Return the report on each text, given the model's answers to all pieces."""
        return [self._of_text(index, *each) for index, each in enumerate(pieces.group(answers))]

    def _of_text(
        self, index: int, pieces: Sequence[TextPiece], answers: Sequence[PooledText]
    ) -> ClassifiedText:
        each = [answer.scores for answer in answers]
        how = "mean" if self._split is None else self._split.aggregate or "mean"
        scores = self._best(whole_scores(pieces, each, how))
        return ClassifiedText(
            index=index,
            label=scores[0].label,
            scores=scores,
            truncated=any(answer.is_truncated for answer in answers),
            pieces=None if self._split is None else list(map(self._of_piece, pieces, answers)),
        )

    def _of_piece(self, piece: TextPiece, answer: PooledText) -> ClassifiedPiece:
        scores = self._best(answer.scores)
        return ClassifiedPiece(
            start=piece.span.start,
            end=piece.span.end,
            label=scores[0].label,
            scores=scores,
            truncated=answer.is_truncated,
        )

    def _best(self, scores: Sequence[float]) -> list[LabelScore]:
        """Return labels with their scores, best first; equal scores keep the labels' order."""
        ranked = sorted(range(len(scores)), key=lambda label: -scores[label])
        return [
            LabelScore(label=self._labels[label], score=scores[label])
            for label in ranked[: self._num_reported]
        ]


def check_num_scores(num_scores: int, param: str) -> int:
    """Return the number of an answer's scores; refuse a number that is too high.

    Raises:
        InvalidRequestError: It exceeds `MAX_NUM_SCORES`.
    """
    if num_scores > MAX_NUM_SCORES:
        fewer_labels = "fewer labels with top_k, or for " if param == "top_k" else ""
        raise InvalidRequestError(
            f"The answer would hold {num_scores} scores; at most {MAX_NUM_SCORES} are returned. "
            f"Ask for {fewer_labels}fewer texts or pieces.",
            param,
        )
    return num_scores
