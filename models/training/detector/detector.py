"""The saved detector: loaded by the plain Auto classes, run in batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from models.training.detector.document import Label
from models.training.detector.pieces import Piece

BATCH: Final = 64


@dataclass(frozen=True, slots=True)
class Prediction:
    """A piece, and the detector's probability that pydoc-chat wrote it."""

    piece: Piece
    chat_probability: float

    @property
    def label(self) -> Label:
        """The likelier author."""
        return Label.CHAT if self.chat_probability > 0.5 else Label.HUMAN

    @property
    def is_right(self) -> bool:
        """Whether that is the piece's author."""
        return self.label is self.piece.label


class Detector:
    """Classifies texts by the model and the tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForSequenceClassification.from_pretrained(folder).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._chat_index: int = self.model.config.label2id[Label.CHAT]

    def predict(
        self, pieces: Sequence[Piece], alter: Callable[[str], str] = lambda text: text
    ) -> list[Prediction]:
        """Classify every piece, in the given order, by its text after `alter`."""
        probabilities = self.chat_probabilities([alter(piece.text) for piece in pieces])
        return [Prediction(*pair) for pair in zip(pieces, probabilities, strict=True)]

    def chat_probabilities(self, texts: Sequence[str]) -> list[float]:
        """Return each text's probability; texts of similar length share a batch."""
        found = [0.0] * len(texts)
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        for at in range(0, len(order), BATCH):
            batch = order[at : at + BATCH]
            logits = self._logits([texts[index] for index in batch])
            probabilities = logits.float().softmax(dim=-1)[:, self._chat_index].tolist()
            for index, probability in zip(batch, probabilities, strict=True):
                found[index] = probability
        return found

    def _logits(self, texts: list[str]) -> Tensor:
        inputs = self.tokenizer(texts, padding=True, return_tensors="pt")
        with torch.inference_mode():
            logits: Tensor = self.model(**inputs).logits
        return logits
