"""The saved pydoc-search: loaded by sentence-transformers, as users load it, and asked."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from models.training.search.entries import Entry


class Encoder:
    """Embeds texts by the model of a folder, on the CPU."""

    def __init__(self, folder: Path, dimensions: int | None = None) -> None:
        """Load the model; `dimensions` cuts its vectors and normalises them again."""
        self.model: Any = SentenceTransformer(
            str(folder), device="cpu", truncate_dim=dimensions, local_files_only=True
        )

    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return one vector of length 1 a text: [texts, dimensions], float32."""
        vectors = self.model.encode(list(texts), batch_size=128, convert_to_tensor=True)
        return torch.nn.functional.normalize(vectors.float(), dim=1)


class Index:
    """The entries' vectors, searched by their dot product with a question's."""

    def __init__(self, encoder: Encoder, entries: Sequence[Entry]) -> None:
        self._encoder = encoder
        self._vectors = encoder.embed([entry.text for entry in entries])

    def best(self, questions: Sequence[str], count: int) -> list[list[int]]:
        """Return for each question the indices of the best entries, best first."""
        scores = self._encoder.embed(questions) @ self._vectors.T
        best: list[list[int]] = scores.topk(count, dim=1).indices.tolist()
        return best
