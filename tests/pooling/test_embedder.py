"""Vectors are those of sentence-transformers, alone and in company."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedModel

from deployments.contract.pooling import PoolingRequest
from deployments.pooling.pooling_model import PoolingModel
from deployments.pooling.text_encoder import EncodedTexts, TextEncoder
from tests.pooling import tiny_embedders
from tests.pooling.tiny_embedders import save_embedder
from tests.pooling.tiny_folder import load

Vectors = npt.NDArray[np.float32]

TOLERANCE = 1e-5
MAX_NUM_CHARS = 126  # two special tokens more are the model's 128 positions

KINDS: dict[str, dict[str, Any]] = {
    "mean": {"make_model": tiny_embedders.bert},
    "cls": {"make_model": tiny_embedders.xlm_roberta, "pooling": "cls"},
    "mean, not normalized": {"make_model": tiny_embedders.modernbert, "normalize": False},
    "last token of a decoder": {"make_model": tiny_embedders.qwen3, "pooling": "lasttoken"},
    "two poolings and two Dense layers": {
        "pooling": ("cls", "mean"),
        "dense": ((64, 48, torch.nn.Tanh()), (48, 16, torch.nn.Identity())),
    },
}


class Embedding:
    """A model as a replica runs it, and as sentence-transformers does."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.loaded = load(folder, task="embed", **changes)
        model = self.loaded.model
        self.pooler = PoolingModel(model, self.loaded.layout, self.loaded.probes.of_length(1))
        self._encoder = TextEncoder(self.loaded.tokenizer, self.loaded.max_model_len)
        self._theirs = SentenceTransformer(str(folder), device="cpu")

    def ours(self, texts: Sequence[str], *, truncate: bool = False) -> Vectors:
        (encoded,) = self._encoder.encode([PoolingRequest("r", tuple(texts), truncate)])
        assert isinstance(encoded, EncodedTexts)
        return self.pooler(encoded.token_ids).numpy()

    def theirs(self, texts: Sequence[str], **options: Any) -> Vectors:
        found: Vectors = self._theirs.encode(list(texts), **options)
        return found


@pytest.fixture(scope="module", params=KINDS)
def embedding(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Embedding:
    return Embedding(save_embedder(tmp_path_factory.mktemp("model"), **KINDS[request.param]))


def assert_same(ours: Vectors, theirs: Vectors) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_models_are_packed(embedding: Embedding) -> None:
    assert embedding.loaded.layout == "packed"


@given(
    st.lists(st.text("abcdefg .,?", min_size=1, max_size=MAX_NUM_CHARS), min_size=1, max_size=12)
)
@settings(max_examples=15, deadline=None)
def test_a_text_s_vector_is_that_of_sentence_transformers_whatever_its_company(
    embedding: Embedding, texts: list[str]
) -> None:
    alone = embedding.theirs(texts, batch_size=1)
    assert_same(embedding.ours(texts), alone)
    assert_same(np.concatenate([embedding.ours([text]) for text in texts]), alone)


def test_what_is_too_long_is_truncated_as_there(embedding: Embedding) -> None:
    if embedding.loaded.max_model_len == 128:  # XLM-RoBERTa's; the tiny tokenizer does not know it
        embedding._theirs.max_seq_length = 128
    texts = ["a b c " * 60, "short"]
    assert_same(embedding.ours(texts, truncate=True), embedding.theirs(texts))


def test_a_padded_batch_gives_the_same(tmp_path: Path) -> None:
    embedding = Embedding(save_embedder(tmp_path))
    backbone: Any = embedding.loaded.model.base_model
    stock = backbone.stock
    stock.set_attn_implementation("sdpa")
    embedding.loaded.model.backbone = stock
    padded = PoolingModel(embedding.loaded.model, "padded", embedding.loaded.probes.of_length(1))
    embedding.pooler = padded
    texts = ["a", "a longer text", "b" * 100]
    assert_same(embedding.ours(texts), embedding.theirs(texts))


def test_max_seq_length_of_the_files_bounds_a_text(tmp_path: Path) -> None:
    embedding = Embedding(save_embedder(tmp_path, max_seq_length=20))
    assert embedding.loaded.max_model_len == 20
    texts = ["a b c " * 9]
    assert_same(embedding.ours(texts, truncate=True), embedding.theirs(texts))


def test_the_older_files_say_the_same(tmp_path: Path) -> None:
    """As those of all-MiniLM-L6-v2."""
    folder = save_embedder(tmp_path, tiny_embedders.bert, "cls")
    types = ("Transformer", "Pooling", "Normalize")
    write(
        folder / "modules.json",
        [
            {
                "idx": index,
                "name": str(index),
                "path": f"{index}_{name}" if index else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for index, name in enumerate(types)
        ],
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": True})
    write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": 32,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    embedding = Embedding(folder)
    assert embedding.loaded.max_model_len == 32
    texts = ["Lower CASE", "lower case"]
    ours = embedding.ours(texts)
    assert_same(ours, embedding.theirs(texts))
    assert (ours[0] == ours[1]).all()


def test_a_model_without_these_files_pools_by_the_mean(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_embedder(tmp_path).parent / "backbone"
    embedding = Embedding(folder)
    assert "has no modules.json" in caplog.text
    texts = ["a", "b c"]
    assert_same(embedding.ours(texts), embedding.theirs(texts))


def test_truncate_dim_of_the_files_cuts_vectors(tmp_path: Path) -> None:
    embedding = Embedding(save_embedder(tmp_path, truncate_dim=8))
    ours = embedding.ours(["a b"])
    assert ours.shape == (1, 8)
    assert_same(ours, embedding.theirs(["a b"]))


@pytest.mark.parametrize(
    "make_model", [tiny_embedders.bert, tiny_embedders.qwen3], ids=["encoder", "decoder"]
)
def test_bfloat16_changes_little(tmp_path: Path, make_model: Callable[[], PreTrainedModel]) -> None:
    folder = save_embedder(tmp_path, make_model)
    exact = Embedding(folder).ours(["some text", "other"])
    rounded = Embedding(folder, dtype="bfloat16").ours(["some text", "other"])
    assert rounded.dtype == np.float32
    assert ((exact * rounded).sum(axis=1) > 0.98).all()


def write(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content))
