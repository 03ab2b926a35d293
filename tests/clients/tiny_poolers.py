"""Tiny random models for the clients of embeddings and rerank, as entries of a configuration."""

from pathlib import Path
from typing import Any

from tests.pooling.test_cross_encoder import cross_bert, save
from tests.pooling.tiny_embedders import bert, save_embedder

EMBEDDER, RERANKER = "tiny-embedder", "tiny-reranker"
WIDTH = 32
MAX_MODEL_LEN = 130


def entries(folder: Path) -> list[dict[str, Any]]:
    """Save an embedding model and a cross-encoder, and return their entries."""
    embedder = save_embedder(
        folder / EMBEDDER,
        lambda: bert(matryoshka_dimensions=[8, 16]),
        prompts={"query": "search: ", "document": ""},
    )
    (folder / RERANKER).mkdir()
    reranker = save(folder / RERANKER, cross_bert())
    common = {"num_cpus": 0, "dtype": "float32", "num_threads": 1}
    return [
        {"id": EMBEDDER, "source": str(embedder), "task": "embed", **common},
        {"id": RERANKER, "source": str(reranker), "task": "classify", **common},
    ]
