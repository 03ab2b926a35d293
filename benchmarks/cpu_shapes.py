"""Models of the shapes that CPUs serve, with random weights; nothing is downloaded.

Source: config.json of Qwen/Qwen2-0.5B, meta-llama/Llama-3.2-1B, princeton-nlp/Sheared-LLaMA-1.3B,
Qwen/Qwen2.5-1.5B and google/gemma-3-1b-it.
"""

from collections.abc import Callable, Mapping

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from benchmarks.gpu.shapes import QWEN_05B, QWEN_ROPE
from benchmarks.random_model import FOLDER, loaded_with_tokenizer
from benchmarks.three_million import config as three_million
from deployments.compute.model_files import choose_dtype
from deployments.engine.model.loader import LoadedModel, load_model

CPU = torch.device("cpu")

PYDOC_CHAT = "pydoc-chat"

SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "3M": three_million,
    "Qwen2-0.5B": lambda: Qwen2Config(**QWEN_05B.options),
    "Llama-3.2-1B": lambda: LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
    ),
    "Sheared-LLaMA-1.3B": lambda: LlamaConfig(
        vocab_size=32_000,
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
    "Qwen2.5-1.5B": lambda: Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32_768,
        rope_parameters=QWEN_ROPE,
        tie_word_embeddings=True,
    ),
    "gemma-3-1b": lambda: Gemma3TextConfig(
        vocab_size=262_144,
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        tie_word_embeddings=True,
    ),
}
"""The configurations by name. `PYDOC_CHAT` is loaded from its folder."""


def chosen_dtype(dtype: str = "auto") -> torch.dtype:
    """Return the dtype that a bfloat16 model gets on this CPU; see `dtype` of a model's entry."""
    return choose_dtype(Qwen2Config(dtype="bfloat16"), dtype, CPU)


def load_shape(name: str, dtype: torch.dtype) -> LoadedModel:
    """Return a model of this name as the loader would return it."""
    if name == PYDOC_CHAT:
        text = str(dtype).removeprefix("torch.")
        return load_model(str(FOLDER), revision=None, dtype=text, device=CPU)
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        SHAPES[name](), dtype=dtype
    )
    return loaded_with_tokenizer(model)
