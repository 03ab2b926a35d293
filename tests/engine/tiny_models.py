"""Tiny random models of the families that the engine serves.

With them comes what stock transformers generates: the oracle that the engine must equal.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from deployments.engine.engine import Engine
from deployments.engine.engine_limits import EngineLimits
from deployments.engine.model_loader import LoadedModel, prepare_model

VOCAB_SIZE = 300
EOS_TOKEN_ID = 1
IMAGE_TOKEN_ID = 7
TOKENS_PER_IMAGE = 4
IMAGE_SIZE = 16


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a byte-level tokenizer: ids 0 to 43 are special, then one id for each byte."""
    special = ["<pad>", "<eos>", *(f"<special{i}>" for i in range(42))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        tokenizer_object=tokenizer, eos_token="<eos>"
    )
    fast.add_special_tokens({"additional_special_tokens": special[2:]})
    return fast


SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
    "bos_token_id": 2,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
}


def qwen2() -> PreTrainedModel:
    """Return a Qwen2 with grouped queries and biases on q, k and v."""
    torch.manual_seed(1)
    return Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_key_value_heads=2))


def llama() -> PreTrainedModel:
    """Return a Llama whose heads each have keys of their own."""
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4))


def qwen3() -> PreTrainedModel:
    """Return a Qwen3 with norms on queries and keys, and heads wider than the hidden size."""
    torch.manual_seed(4)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16))


def mistral() -> PreTrainedModel:
    """Return a Mistral with a sliding window in every layer."""
    torch.manual_seed(5)
    config = MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=7)
    return MistralForCausalLM(config)


def phi3() -> PreTrainedModel:
    """Return a Phi-3 with fused projections."""
    torch.manual_seed(6)
    return Phi3ForCausalLM(Phi3Config(**SHAPE, num_key_value_heads=2))


def gemma3() -> PreTrainedModel:
    """Return a Gemma 3 with a vision tower and a sliding window shorter than the prompts."""
    torch.manual_seed(3)
    text = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.3,
        query_pre_attn_scalar=8,
    )
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": 4,
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        image_token_index=IMAGE_TOKEN_ID,
        boi_token_index=5,
        eoi_token_index=6,
    )
    model = Gemma3ForConditionalGeneration(config)
    # Stock initialisation leaves the projector at zero, and images without effect.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "llama": llama,
    "mistral": mistral,
    "phi3": phi3,
    "gemma3": gemma3,
}


def load(make_model: Callable[[], PreTrainedModel]) -> LoadedModel:
    """Return a tiny model as the loader would: float32, on the CPU, attending over slots."""
    model = make_model()
    prepare_model(model)
    return LoadedModel(model, byte_tokenizer(), None, frozenset({EOS_TOKEN_ID}))


def make_engine(
    loaded: LoadedModel, *, num_slots: int = 3, max_model_len: int = 96, budget: int = 24
) -> Engine:
    """Return an engine with few slots and a budget that cuts longer prompts into chunks."""
    return Engine(loaded, EngineLimits(num_slots, max_model_len, budget))


def generate(
    make_model: Callable[[], PreTrainedModel],
    prompt: Sequence[int],
    max_tokens: int,
    model_inputs: Mapping[str, torch.Tensor] | None = None,
) -> list[int]:
    """Return what the stock model generates greedily behind a prompt."""
    model = make_model().train(mode=False)
    input_ids = torch.tensor([list(prompt)])
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        **(model_inputs or {}),
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids
