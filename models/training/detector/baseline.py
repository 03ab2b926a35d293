"""A bag of characters: how well counts of characters tell the two authors apart.

This baseline knows no words. A detector that is no better has learned only marks of format.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from models.training.detector.architecture import LABELS
from models.training.detector.pieces import Piece


class BagOfCharacters:
    """Logistic regression on the share of each ASCII character in a piece."""

    def __init__(
        self, pieces: Sequence[Piece], *, l2: float = 1e-4, max_iterations: int = 200
    ) -> None:
        """Fit by L-BFGS; the same pieces give the same weights."""
        features, labels = _features(pieces), _labels(pieces)
        self._mean, self._std = features.mean(dim=0), features.std(dim=0) + 1e-6
        self._weights = torch.zeros(features.shape[1] + 1, requires_grad=True)
        inputs = self._scaled(features)
        optimizer = torch.optim.LBFGS(
            [self._weights], max_iter=max_iterations, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(inputs @ self._weights, labels)
            loss = loss + l2 * self._weights.square().sum()
            loss.backward()  # type: ignore[no-untyped-call] # left untyped
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call] # left untyped

    def accuracy(self, pieces: Sequence[Piece]) -> float:
        """Return the share of pieces that it classifies correctly."""
        logits = self._scaled(_features(pieces)) @ self._weights.detach()
        return ((logits > 0) == _labels(pieces).bool()).float().mean().item()

    def _scaled(self, features: Tensor) -> Tensor:
        scaled = (features - self._mean) / self._std
        return torch.cat([scaled, torch.ones(len(features), 1)], dim=1)


def _features(pieces: Sequence[Piece]) -> Tensor:
    """Return the share of each character: [pieces, 128], float32."""
    features = torch.zeros(len(pieces), 128)
    for row, piece in zip(features, pieces, strict=True):
        codes = torch.tensor([min(ord(char), 127) for char in piece.text])
        row += torch.bincount(codes, minlength=128) / len(codes)
    return features


def _labels(pieces: Sequence[Piece]) -> Tensor:
    return torch.tensor([float(LABELS.index(piece.label)) for piece in pieces])
