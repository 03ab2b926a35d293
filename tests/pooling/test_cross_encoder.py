"""Scores of pairs are those of sentence-transformers' CrossEncoder, alone and in company."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import CrossEncoder
from tokenizers import processors
from transformers import AlbertConfig, BertConfig, DistilBertConfig, PreTrainedModel, RobertaConfig

from deployments.contract.pooling import PoolingInput, PoolingRequest, TextPair
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.pooling.pooling_model import PoolingModel
from deployments.pooling.text_encoder import EncodedTexts, TextEncoder
from tests.engine.tiny_models import byte_tokenizer
from tests.pooling.tiny_classifiers import SHAPE, make
from tests.pooling.tiny_embedders import save_embedder
from tests.pooling.tiny_folder import load

ONE_LABEL = {
    **SHAPE,
    "id2label": {0: "LABEL_0"},
    "label2id": {"LABEL_0": 0},
    "initializer_range": 0.1,
}
PAIR = "<special0> $A <special1> $B:1 <special1>:1"


def cross_bert() -> PreTrainedModel:
    """It tells a pair's texts apart by token_type_ids."""
    return make(BertConfig(type_vocab_size=2, **ONE_LABEL))


def cross_albert() -> PreTrainedModel:
    """It tells texts apart in the same way, and can't be packed."""
    return make(AlbertConfig(embedding_size=16, type_vocab_size=2, **ONE_LABEL))


def cross_distilbert() -> PreTrainedModel:
    """It has no types of tokens, though it is mostly saved with BERT's tokenizer."""
    shape = {**ONE_LABEL, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        del shape[name]
    return make(DistilBertConfig(**shape))


def cross_roberta() -> PreTrainedModel:
    """It has one type of tokens."""
    return make(RobertaConfig(**{**ONE_LABEL, "pad_token_id": 1, "type_vocab_size": 1}))


def save(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    has_types = getattr(model.config, "type_vocab_size", 2) > 1
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<special0> $A <special1>",
        pair=PAIR if has_types else PAIR.replace(":1", ""),
        special_tokens=[("<special0>", 2), ("<special1>", 3)],
    )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if has_types else [])]
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # `save_pretrained` leaves these names out
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_input_names": names}))
    return folder


class Scoring:
    """A model as a replica runs it, and as sentence-transformers does."""

    def __init__(self, folder: Path) -> None:
        loaded = load(folder)
        self.max_model_len = loaded.max_model_len
        self.layout = loaded.layout
        self.encoder = TextEncoder(
            loaded.tokenizer, loaded.max_model_len, reads_types=loaded.reads_types
        )
        self._pooler = PoolingModel(loaded.model, loaded.layout, loaded.probes.of_length(1))
        self._theirs = CrossEncoder(str(folder), device="cpu", max_length=loaded.max_model_len)
        self.model_type = loaded.model.config.model_type
        self.has_types = self.model_type in ("bert", "albert")

    def encode(self, texts: Sequence[PoolingInput], **options: Any) -> EncodedTexts:
        (encoded,) = self.encoder.encode([PoolingRequest("r", tuple(texts), **options)])
        assert isinstance(encoded, EncodedTexts)
        return encoded

    def scores(self, texts: Sequence[PoolingInput], **options: Any) -> list[float]:
        encoded = self.encode(texts, **options)
        scores: list[float] = self._pooler(encoded.token_ids, encoded.type_ids)[:, 0].tolist()
        return scores

    def ours(self, pairs: list[tuple[str, str]], **options: Any) -> list[float]:
        return self.scores([TextPair(*pair) for pair in pairs], **options)

    def theirs(self, pairs: list[tuple[str, str]], **options: Any) -> list[float]:
        scores: list[float] = self._theirs.predict(pairs, **options).tolist()
        return scores


MODELS = (cross_bert, cross_roberta, cross_albert, cross_distilbert)


@pytest.fixture(scope="module", params=MODELS, ids=lambda make_model: make_model.__name__)
def scoring(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scoring:
    return Scoring(save(tmp_path_factory.mktemp("model"), request.param()))


TEXT = st.text("abcdefg .,?", min_size=1, max_size=60)


@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_scores_are_those_of_sentence_transformers_whatever_their_company(
    scoring: Scoring, pairs: list[tuple[str, str]]
) -> None:
    alone = scoring.theirs(pairs, batch_size=1)
    np.testing.assert_allclose(scoring.ours(pairs), alone, atol=1e-5)
    np.testing.assert_allclose([scoring.ours([pair])[0] for pair in pairs], alone, atol=1e-5)


def test_the_order_of_a_pair_s_texts_matters(scoring: Scoring) -> None:
    (one,), (other,) = scoring.ours([("abc", "def")]), scoring.ours([("def", "abc")])
    assert abs(one - other) > 1e-4


def test_tokens_have_types_where_the_model_tells_them_apart(scoring: Scoring) -> None:
    (types, none) = scoring.encode([TextPair("abc", "de"), "abc"]).type_ids
    assert types == ((0, 0, 0, 0, 0, 1, 1, 1) if scoring.has_types else None)
    assert none is None
    assert scoring.layout == ("padded" if scoring.model_type == "albert" else "packed")


def test_a_pair_gets_its_own_score_in_a_batch_with_a_text(scoring: Scoring) -> None:
    texts: list[PoolingInput] = ["a text by itself", TextPair("abc", "defg"), "ab"]
    alone = [scoring.scores([text])[0] for text in texts]
    np.testing.assert_allclose(scoring.scores(texts), alone, atol=1e-5)


def test_a_pair_that_is_too_long_is_truncated_as_there(scoring: Scoring) -> None:
    pairs = [("a b " * 20, "c d e " * 40), ("short", "g" * 200), ("f" * 150, "g" * 150)]
    found = scoring.ours(pairs, truncate=True)
    np.testing.assert_allclose(found, scoring.theirs(pairs), atol=1e-5)


def test_only_a_second_text_s_end_is_dropped_where_its_length_is_bounded(scoring: Scoring) -> None:
    pairs = [("a b c", "d" * 30), ("a b c", "d" * 5)]
    found = scoring.ours(pairs, max_text_tokens=10)
    expected = scoring.theirs([("a b c", "d" * 10), ("a b c", "d" * 5)])
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("query", "document", "max_tokens", "read"),
    [
        ("q" * 150, "d" * 200, 10, ("q" * 150, "d" * 10)),
        ("q" * 150, "d" * 5, 10, ("q" * 150, "d" * 5)),
        ("q" * 90, "d" * 200, 100, ("q" * 90, "d" * 100)),
        ("q" * 10, "d" * 200, 120, ("q" * 10, "d" * 120)),
    ],
)
def test_a_second_text_s_bound_holds_if_the_pair_is_truncated_too(
    scoring: Scoring, query: str, document: str, max_tokens: int, read: tuple[str, str]
) -> None:
    options = {"truncate": True, "max_text_tokens": max_tokens}
    found = scoring.encode([TextPair(query, document)], **options)
    expected = scoring.encode([TextPair(*read)], truncate=True)
    assert (found.token_ids, found.type_ids) == (expected.token_ids, expected.type_ids)
    assert len(found.token_ids[0]) == scoring.max_model_len
    np.testing.assert_allclose(
        scoring.ours([(query, document)], **options), scoring.theirs([read]), atol=1e-5
    )


@pytest.mark.parametrize("is_older", [False, True])
def test_the_files_name_the_activation(tmp_path: Path, is_older: bool) -> None:
    folder = save(tmp_path, cross_bert())
    sigmoid = Scoring(folder).ours([("a", "b")])
    if is_older:
        path = folder / "config.json"
        setting = {"activation_fn": "torch.nn.modules.linear.Identity"}
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"sentence_transformers": setting})
        )
    else:
        made = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
        folder = tmp_path / "newer"
        made.save_pretrained(str(folder), create_model_card=False)
    scoring = Scoring(folder)
    logits = scoring.ours([("a", "b")])
    np.testing.assert_allclose(logits, scoring.theirs([("a", "b")]), atol=1e-5)
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(logits))), sigmoid, atol=1e-5)


def test_another_activation_is_refused_by_name(tmp_path: Path) -> None:
    folder = save(tmp_path, cross_bert())
    made = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Tanh())
    folder = tmp_path / "newer"
    made.save_pretrained(str(folder), create_model_card=False)
    with pytest.raises(UnsupportedModelError, match=r"activation\.Tanh"):
        Scoring(folder)


def test_an_embedding_model_is_no_classifier(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="task: embed"):
        Scoring(save_embedder(tmp_path))
