"""Tiny random embedding models in folders that sentence-transformers itself has written."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import (
    AutoModel,
    BertConfig,
    ModernBertConfig,
    PreTrainedModel,
    Qwen3Config,
    XLMRobertaConfig,
)

from tests.pooling.tiny_classifiers import SHAPE, make
from tests.pooling.tiny_folder import framing_tokenizer

MakeModel = Callable[[], PreTrainedModel]

_LABELS = ("id2label", "label2id")
_SHAPE = {name: value for name, value in SHAPE.items() if name not in _LABELS}


def bert(**changes: Any) -> PreTrainedModel:
    """It has a pooler, which no vector is made from."""
    return make(BertConfig(**{**_SHAPE, **changes}), AutoModel)


def xlm_roberta() -> PreTrainedModel:
    """Its positions start after the padding token's id."""
    return make(XLMRobertaConfig(**{**_SHAPE, "pad_token_id": 1}), AutoModel)


def modernbert() -> PreTrainedModel:
    """It has rotary positions and a window in some layers."""
    windows = {"local_attention": 8, "global_attn_every_n_layers": 2}
    return make(ModernBertConfig(**{**_SHAPE, **windows}), AutoModel)


def qwen3() -> PreTrainedModel:
    """A decoder, whose vectors come from the last token."""
    return make(Qwen3Config(num_key_value_heads=2, head_dim=8, **_SHAPE), AutoModel)


def save_embedder(
    folder: Path,
    make_model: MakeModel = bert,
    pooling: str | Sequence[str] = "mean",
    *,
    dense: Sequence[tuple[int, int, Any]] = (),
    normalize: bool = True,
    max_seq_length: int | None = None,
    **settings: Any,
) -> Path:
    """Save a model with the files of sentence-transformers.

    `dense` has the widths and the activation of each Dense layer; `settings` are arguments of
    SentenceTransformer, such as prompts.
    """
    backbone = folder / "backbone"
    model = make_model()
    model.save_pretrained(backbone)
    tokenizer = framing_tokenizer()
    # sentence-transformers pads.
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id)
    tokenizer.save_pretrained(backbone)
    transformer = Transformer(str(backbone), max_seq_length=max_seq_length)
    modules: list[Any] = [transformer, Pooling(transformer.get_embedding_dimension(), pooling)]
    torch.manual_seed(1)
    modules += [Dense(width, to, activation_function=own) for width, to, own in dense]
    modules += [Normalize()] if normalize else []
    SentenceTransformer(modules=modules, device="cpu", **settings).save(
        str(folder / "model"), create_model_card=False
    )
    return folder / "model"
