"""Sequence classifiers of many architectures, tiny and with random weights."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import (
    AlbertConfig,
    AutoModelForSequenceClassification,
    BartConfig,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    FNetConfig,
    GPT2Config,
    MistralConfig,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    RobertaConfig,
    T5Config,
    XLNetConfig,
)

from deployments.pooling.pooling_model import Layout
from tests.engine.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE

END = 3
"""The token with which `framing_tokenizer` ends each text."""

LABELS = {0: "human", 1: "machine", 2: "both"}

SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
    "bos_token_id": 2,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "id2label": LABELS,
    "label2id": {name: i for i, name in LABELS.items()},
}


def make(
    config: PreTrainedConfig, auto: Any = AutoModelForSequenceClassification
) -> PreTrainedModel:
    """Return a model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    model: PreTrainedModel = auto.from_config(config)
    model.train(mode=False)
    return model


def roberta(**changes: Any) -> PreTrainedModel:
    """Its positions start after the padding token's id."""
    return make(RobertaConfig(**{**SHAPE, "pad_token_id": 1, **changes}))


def bert() -> PreTrainedModel:
    """It has a pooler between the backbone and the head."""
    return make(BertConfig(**SHAPE))


def distilbert() -> PreTrainedModel:
    """Its configuration has its own names for the shape."""
    shape = dict(SHAPE)
    hidden, inner = shape.pop("hidden_size"), shape.pop("intermediate_size")
    layers, heads = shape.pop("num_hidden_layers"), shape.pop("num_attention_heads")
    return make(DistilBertConfig(dim=hidden, hidden_dim=inner, n_layers=layers, n_heads=heads,
                                 **shape))  # fmt: skip


def modernbert(**changes: Any) -> PreTrainedModel:
    """It has rotary positions, a window in some layers, and no biases."""
    shape = {**SHAPE, "local_attention": 8, "global_attn_every_n_layers": 2, **changes}
    return make(ModernBertConfig(**shape))


def qwen2(**changes: Any) -> PreTrainedModel:
    """A decoder that classifies by the last token; its heads share keys."""
    return make(Qwen2Config(num_key_value_heads=2, **{**SHAPE, **changes}))


def qwen2_without_padding() -> PreTrainedModel:
    """It has no padding token, like many generators."""
    return make(Qwen2Config(num_key_value_heads=2, **{**SHAPE, "pad_token_id": None}))


def mistral() -> PreTrainedModel:
    """A decoder with a window in all layers."""
    return make(MistralConfig(num_key_value_heads=2, sliding_window=7, **SHAPE))


def gpt2() -> PreTrainedModel:
    """A decoder with learned positions."""
    return make(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=130,
                           **{k: SHAPE[k] for k in ("vocab_size", "id2label", "label2id",
                              "pad_token_id", "bos_token_id", "eos_token_id",
                              "initializer_range")}))  # fmt: skip


def albert() -> PreTrainedModel:
    """Its pooler takes only the first token, not the whole text."""
    return make(AlbertConfig(embedding_size=16, **SHAPE))


def deberta() -> PreTrainedModel:
    """It has its own attention, with relative positions."""
    return make(DebertaV2Config(relative_attention=True, pos_att_type=["c2p", "p2c"], **SHAPE))


def mpnet() -> PreTrainedModel:
    """It has biases on distances."""
    return make(MPNetConfig(**SHAPE))


def deberta_without_padding() -> PreTrainedModel:
    """It can be neither packed nor padded: it has no padding token."""
    return make(DebertaV2Config(relative_attention=True, pos_att_type=["c2p", "p2c"],
                                **{**SHAPE, "pad_token_id": None}))  # fmt: skip


def bart() -> PreTrainedModel:
    """It accepts only texts that end in EOS, and classifies by its decoder's state there."""
    shape = {k: v for k, v in SHAPE.items() if not k.startswith(("hidden", "num", "init", "inter"))}
    return make(BartConfig(d_model=32, encoder_layers=2, decoder_layers=2, init_std=0.3,
                           encoder_attention_heads=4, decoder_attention_heads=4,
                           encoder_ffn_dim=48, decoder_ffn_dim=48, decoder_start_token_id=END,
                           **{**shape, "eos_token_id": END}))  # fmt: skip


def t5() -> PreTrainedModel:
    """It accepts only texts that end in EOS; its backbone needs the decoder's input."""
    shape = {k: SHAPE[k] for k in ("vocab_size", "id2label", "label2id", "pad_token_id")}
    config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, eos_token_id=END,
                      **shape)  # fmt: skip
    config.decoder_start_token_id = 0
    return make(config)


def xlnet() -> PreTrainedModel:
    """It classifies by a row's last place, padding or not."""
    return make(XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=48,
                            **{k: SHAPE[k] for k in ("vocab_size", "id2label", "label2id",
                               "pad_token_id", "bos_token_id", "eos_token_id",
                               "initializer_range")}))  # fmt: skip


def fnet() -> PreTrainedModel:
    """It mixes all places of a row, and accepts no mask."""
    shape = {k: v for k, v in SHAPE.items() if k != "num_attention_heads"}
    return make(FNetConfig(**shape))


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    maker.__name__: maker
    for maker in (
        roberta,
        bert,
        distilbert,
        modernbert,
        qwen2,
        qwen2_without_padding,
        mistral,
        gpt2,
        albert,
        deberta,
        mpnet,
        bart,
        t5,
        xlnet,
        fnet,
        deberta_without_padding,
    )
}
LAYOUTS: Mapping[str, Layout] = {
    "albert": "padded",
    "deberta": "padded",
    "mpnet": "padded",
    "bart": "padded",
    "t5": "padded",
    "xlnet": "one by one",
    "fnet": "one by one",
    "deberta_without_padding": "one by one",
}
"""The layouts of the models that can't be packed."""
