"""What an answer tells of a classifier's probabilities: labels with scores, the best first."""

from collections.abc import Sequence
from typing import Final

from deployments.contract import Classification
from deployments.errors import InvalidRequestError
from serve_app.api.classify_schema import ClassifiedPiece, ClassifiedText, LabelScore, SplitOptions
from serve_app.api.text_pieces import TextPiece, TextPieces, whole_scores

MAX_NUM_SCORES: Final = 2**16
"""Scores in one answer: with a thousand labels, those of all pieces would fill a gigabyte, and to
write them as JSON holds up every stream, on whatever thread it is done."""


class ScoreReport:
    """Tells scores as one request wants them told."""

    def __init__(
        self, labels: Sequence[str], top_k: int | None, split: SplitOptions | None
    ) -> None:
        """Keep what is told.

        Args:
            labels: In the order of the model's probabilities.
            top_k: How many are told; None tells all.
            split: How the texts were split, if they were.
        """
        self._labels = labels
        self._num_told = min(top_k or len(labels), len(labels))
        self._split = split

    def check_size(self, pieces: TextPieces) -> int:
        """Return how many scores an answer will hold, or refuse it before it is worked for.

        Raises:
            InvalidRequestError: It would hold more than `MAX_NUM_SCORES`.
        """
        return check_num_scores(len(pieces) * self._num_told, "top_k")

    def of_texts(
        self, pieces: TextPieces, answers: Sequence[Classification]
    ) -> list[ClassifiedText]:
        """Return what is told of each text, given what the model said of all pieces."""
        return [self._of_text(index, *each) for index, each in enumerate(pieces.group(answers))]

    def _of_text(
        self, index: int, pieces: Sequence[TextPiece], answers: Sequence[Classification]
    ) -> ClassifiedText:
        each = [answer.probabilities for answer in answers]
        how = "mean" if self._split is None else self._split.aggregate or "mean"
        scores = self._best(whole_scores(pieces, each, how))
        return ClassifiedText(
            index=index,
            label=scores[0].label,
            scores=scores,
            truncated=any(answer.is_truncated for answer in answers),
            pieces=None if self._split is None else list(map(self._of_piece, pieces, answers)),
        )

    def _of_piece(self, piece: TextPiece, answer: Classification) -> ClassifiedPiece:
        scores = self._best(answer.probabilities)
        return ClassifiedPiece(
            start=piece.span.start,
            end=piece.span.end,
            label=scores[0].label,
            scores=scores,
            truncated=answer.is_truncated,
        )

    def _best(self, scores: Sequence[float]) -> list[LabelScore]:
        """Return labels with their scores, of equal ones the earlier label first."""
        ranked = sorted(range(len(scores)), key=lambda label: -scores[label])
        return [
            LabelScore(label=self._labels[label], score=scores[label])
            for label in ranked[: self._num_told]
        ]


def check_num_scores(num_scores: int, param: str) -> int:
    """Return the number, or refuse an answer of so many scores.

    Raises:
        InvalidRequestError: They exceed `MAX_NUM_SCORES`.
    """
    if num_scores > MAX_NUM_SCORES:
        fewer_labels = "fewer labels with top_k, or for " if param == "top_k" else ""
        raise InvalidRequestError(
            f"The answer would hold {num_scores} scores; at most {MAX_NUM_SCORES} are told. "
            f"Ask for {fewer_labels}fewer texts or pieces.",
            param,
        )
    return num_scores
