"""Models of the shapes that CPUs serve, with random weights; nothing is downloaded.

Source: config.json of Qwen/Qwen2-0.5B, meta-llama/Llama-3.2-1B, princeton-nlp/Sheared-LLaMA-1.3B,
Qwen/Qwen2.5-1.5B and google/gemma-3-1b-it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
)

from benchmarks.gpu.shapes import QWEN_05B, QWEN_ROPE
from deployments.compute.model_files import choose_dtype
from deployments.engine.model.loader import LoadedModel, load_model, prepare_model

CPU = torch.device("cpu")

PYDOC_CHAT = "pydoc-chat"
FOLDER = Path(__file__).resolve().parent.parent / "models" / PYDOC_CHAT


def three_million() -> Qwen2Config:
    """Return a shape of 3 million parameters: its steps take more of Python than of arithmetic."""
    return Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )


THREE_MILLION = "3M"

SHAPES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    THREE_MILLION: three_million,
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


def load_shape(name: str, dtype: torch.dtype, quantization: str | None = None) -> LoadedModel:
    """Return a model of this name as the loader would return it.

    A model with random weights has the embedded model's tokenizer, and its answers do not end.
    """
    if name == PYDOC_CHAT:
        text = str(dtype).removeprefix("torch.")
        return load_model(
            str(FOLDER), revision=None, dtype=text, device=CPU, quantization=quantization
        )
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        SHAPES[name](), dtype=dtype
    )
    tokenizer = load_model(str(FOLDER), revision=None, dtype="float32", device=CPU).tokenizer
    prepare_model(model, quantization)
    return LoadedModel(model, tokenizer, None, frozenset())


def save_shape(name: str, folder: Path) -> PreTrainedTokenizerBase:
    """Save a model in bfloat16 with pydoc-chat's tokenizer, for a server to load.

    At temperature 0 each token is visible ASCII and none ends the answer: the embeddings of the
    other tokens are zero, so their logits are never the largest.

    Args:
        name: A name in `SHAPES` whose output embeddings are the input's.
        folder: Is made.

    Returns:
        The tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        SHAPES[name](), dtype=torch.bfloat16
    )
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, torch.Tensor), "input embeddings are a matrix"
    is_silent = [
        not _is_visible(str(tokenizer.decode([token_id], skip_special_tokens=True)))
        for token_id in range(len(embeddings))
    ]
    with torch.no_grad():
        embeddings[torch.tensor(is_silent)] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _is_visible(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()
