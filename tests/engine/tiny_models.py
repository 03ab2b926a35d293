"""Tiny random models of the families that the engine serves.

Also generates with stock transformers: the oracle that the engine must equal.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, prepare_model
from deployments.plan.kv_layout import KVLayout

VOCAB_SIZE = 300
EOS_TOKEN_ID = 1
IMAGE_TOKEN_ID = 7
TOKENS_PER_IMAGE = 4
IMAGE_SIZE = 16
PATCH_SIZE = 4


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


def wide_qwen2() -> PreTrainedModel:
    """Return a Qwen2 with heads of 32 values: vLLM takes none that are smaller on a CPU."""
    torch.manual_seed(1)
    wide = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(**{**SHAPE, **wide, "max_position_embeddings": 512})
    return Qwen2ForCausalLM(config)


def qwen2_sliding() -> PreTrainedModel:
    """Return a Qwen2 with a sliding window in its upper layers."""
    torch.manual_seed(7)
    config = Qwen2Config(
        **SHAPE,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=7,
        max_window_layers=1,
    )
    return Qwen2ForCausalLM(config)


def llama() -> PreTrainedModel:
    """Return a Llama with separate keys for every head."""
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=4))


def llama3() -> PreTrainedModel:
    """Return a Llama 3.1 with scaled low rotary frequencies."""
    torch.manual_seed(8)
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = LlamaConfig(
        **SHAPE, num_key_value_heads=2, max_position_embeddings=128, rope_parameters=scaling
    )
    return LlamaForCausalLM(config)


def qwen3() -> PreTrainedModel:
    """Return a Qwen3 with norms on queries and keys, and heads wider than the hidden size."""
    torch.manual_seed(4)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16))


def qwen3_moe() -> PreTrainedModel:
    """Return a Qwen3 with four experts, two of them for each token."""
    torch.manual_seed(9)
    config = Qwen3MoeConfig(
        **SHAPE,
        num_key_value_heads=2,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config)


def mixtral() -> PreTrainedModel:
    """Return a Mixtral with four experts, two of them for each token."""
    torch.manual_seed(10)
    return MixtralForCausalLM(MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=4))


def mistral() -> PreTrainedModel:
    """Return a Mistral with a sliding window in every layer."""
    torch.manual_seed(5)
    config = MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=8, sliding_window=7)
    return MistralForCausalLM(config)


def phi3() -> PreTrainedModel:
    """Return a Phi-3 with fused projections and a sliding window in every layer."""
    torch.manual_seed(6)
    return Phi3ForCausalLM(Phi3Config(**SHAPE, num_key_value_heads=2, sliding_window=7))


def gpt2() -> PreTrainedModel:
    """Return a GPT-2, whose positions are learned."""
    torch.manual_seed(11)
    return GPT2LMHeadModel(GPT2Config(**SHAPE, n_positions=128))


def opt() -> PreTrainedModel:
    """Return an OPT, whose positions are learned and start at two."""
    torch.manual_seed(12)
    config = OPTConfig(**SHAPE, ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=128)
    config.init_std = 0.3
    model = OPTForCausalLM(config)
    # With a small spread of these weights, too, the text would repeat one token.
    torch.nn.init.normal_(model.get_parameter("model.decoder.embed_positions.weight"))
    return model


def gpt_oss() -> PreTrainedModel:
    """Return a gpt-oss whose sinks take much of the weight, with a window in every other layer."""
    torch.manual_seed(15)
    scaling = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 64.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    }
    config = GptOssConfig(
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        max_position_embeddings=1024,
        rope_parameters=scaling,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = GptOssForCausalLM(config)
    for name, weight in model.named_parameters():
        if name.endswith(("sinks", "proj_bias")):  # else without much effect
            torch.nn.init.normal_(weight, std=2)
    return model


def gemma2() -> PreTrainedModel:
    """Return a Gemma 2 with softcaps low enough to affect most scores and logits."""
    torch.manual_seed(13)
    config = Gemma2Config(
        **SHAPE,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    )
    return Gemma2ForCausalLM(config)


def gemma3_text() -> PreTrainedModel:
    """Return a text-only Gemma 3."""
    torch.manual_seed(14)
    return Gemma3ForCausalLM(_gemma3_text_config())


def _gemma3_text_config() -> Gemma3TextConfig:
    return Gemma3TextConfig(
        **{**SHAPE, "num_hidden_layers": 4},
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=8,
    )


def gemma3() -> PreTrainedModel:
    """Return a Gemma 3 with a vision tower and a sliding window shorter than the prompts."""
    torch.manual_seed(3)
    vision = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": IMAGE_SIZE,
        "patch_size": PATCH_SIZE,
    }
    config = Gemma3Config(
        text_config=_gemma3_text_config(),
        vision_config=vision,
        mm_tokens_per_image=TOKENS_PER_IMAGE,
        image_token_index=IMAGE_TOKEN_ID,
        boi_token_index=5,
        eoi_token_index=6,
    )
    model = Gemma3ForConditionalGeneration(config)
    # Stock initialisation leaves the projector at zero, so images would have no effect.
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)
    return model


def qwen2_5_vl() -> PreTrainedModel:
    """Return a Qwen2.5-VL, of whose two vision layers one attends in windows."""
    torch.manual_seed(16)
    positions = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": SHAPE["hidden_size"],
        "patch_size": PATCH_SIZE,
        "window_size": 4 * PATCH_SIZE,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.3,
    }
    config = Qwen2_5_VLConfig(
        text_config={**SHAPE, "num_key_value_heads": 2, "rope_parameters": positions},
        vision_config=vision,
        image_token_id=IMAGE_TOKEN_ID,
        video_token_id=8,
        vision_start_token_id=5,
        vision_end_token_id=6,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


@dataclass(frozen=True)
class Family:
    """Models of one architecture."""

    name: str  # their common name
    make: Callable[[], PreTrainedModel]  # returns a tiny one, the same on each call
    example: str  # a checkpoint on the hub, or the setting that makes a model one of the family


FAMILIES = (
    Family("Qwen2, Qwen2.5", qwen2, "Qwen/Qwen2.5-7B-Instruct"),
    Family("Qwen2 with a window", qwen2_sliding, "`use_sliding_window: true`"),
    Family("Qwen3", qwen3, "Qwen/Qwen3-8B"),
    Family("Qwen3 MoE", qwen3_moe, "Qwen/Qwen3-30B-A3B"),
    Family("Llama 2", llama, "meta-llama/Llama-2-7b-chat-hf"),
    Family("Llama 3", llama3, "meta-llama/Llama-3.1-8B-Instruct"),
    Family("Mistral", mistral, "mistralai/Mistral-7B-Instruct-v0.1"),
    Family("Mixtral", mixtral, "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    Family("Phi-3", phi3, "microsoft/Phi-3-mini-4k-instruct"),
    Family("Gemma 2", gemma2, "google/gemma-2-9b-it"),
    Family("Gemma 3, text", gemma3_text, "google/gemma-3-1b-it"),
    Family("Gemma 3", gemma3, "google/gemma-3-4b-it"),
    Family("Qwen2.5-VL", qwen2_5_vl, "Qwen/Qwen2.5-VL-7B-Instruct"),
    Family("gpt-oss", gpt_oss, "openai/gpt-oss-20b"),
    Family("GPT-2", gpt2, "openai-community/gpt2"),
    Family("OPT", opt, "`model_type: opt`"),
)
"""The families under test; `tests/engine/model_table.py` makes docs/models.md's table from them."""

MODELS: Mapping[str, Callable[[], PreTrainedModel]] = {
    family.make.__name__: family.make for family in FAMILIES
}


def load(make_model: Callable[[], PreTrainedModel]) -> LoadedModel:
    """Return a tiny model as the loader would: float32, on the CPU, attending over a KV cache."""
    model = make_model()
    prepare_model(model)
    return LoadedModel(model, byte_tokenizer(), None, frozenset({EOS_TOKEN_ID}))


def make_engine(
    loaded: LoadedModel,
    *,
    max_num_seqs: int = 3,
    max_model_len: int = 96,
    budget: int = 24,
    max_stall_s: float | None = None,
    memory: float | None = None,
) -> Engine:
    """Return an engine for few sequences, with small blocks and a budget that cuts prompts.

    The KV memory holds `memory` sequences of full length, `max_num_seqs` by default; a step has
    `budget` tokens at most.
    """
    limits = EngineLimits(max_num_seqs, max_model_len, budget, max_stall_s, block_size=8)
    if memory is not None:
        shape = KVShape.of(loaded.text_config, loaded.model.dtype)
        layout = KVLayout(shape.group_capacities(max_model_len), (), limits.block_size)
        blocks = (math.ceil(memory * number) for number in layout.blocks_for(max_model_len))
        limits = replace(limits, kv_blocks=tuple(blocks))
    return Engine(loaded, limits)


@cache
def _stock(make_model: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    model: PreTrainedModel = make_model().train(mode=False)
    return model


def generate(
    make_model: Callable[[], PreTrainedModel],
    prompt: Sequence[int],
    max_tokens: int,
    model_inputs: Mapping[str, torch.Tensor] | None = None,
) -> list[int]:
    """Return what the stock model generates greedily after a prompt."""
    if model_inputs:
        return _generated(make_model, tuple(prompt), max_tokens, **model_inputs)
    return _after_text(make_model, tuple(prompt), max_tokens).copy()


@cache
def _after_text(
    make_model: Callable[[], PreTrainedModel], prompt: tuple[int, ...], max_tokens: int
) -> list[int]:
    """Remember the answer, since many tests ask for the same one."""
    return _generated(make_model, prompt, max_tokens)


def _generated(
    make_model: Callable[[], PreTrainedModel],
    prompt: tuple[int, ...],
    max_tokens: int,
    **model_inputs: torch.Tensor,
) -> list[int]:
    model: Any = _stock(make_model)  # transformers' types lack `generate`
    input_ids = torch.tensor([prompt])
    output = model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        **model_inputs,
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids
