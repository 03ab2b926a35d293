"""A model of 3 million parameters: its steps spend more time in Python than in arithmetic."""

from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

TOKENIZER = Path(__file__).resolve().parent.parent / "models" / "pydoc-chat"


def config() -> Qwen2Config:
    """Return the model's configuration, a new one for each model: transformers writes into it."""
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


def three_million() -> Qwen2ForCausalLM:
    """Return the model in bfloat16 with random weights."""
    return Qwen2ForCausalLM(config()).bfloat16()


def save_three_million(folder: Path) -> PreTrainedTokenizerBase:
    """Save the model with pydoc-chat's tokenizer, so that a server can load it.

    At temperature 0 each token is visible ASCII and none ends the answer: the embeddings of the
    other tokens are zero, so their logits are never the largest.

    Returns:
        The tokenizer.
    """
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    model = three_million()
    is_silent = [
        not _is_visible(str(tokenizer.decode([token_id], skip_special_tokens=True)))
        for token_id in range(model.config.vocab_size)
    ]
    with torch.no_grad():
        model.model.embed_tokens.weight[torch.tensor(is_silent)] = 0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def _is_visible(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable()
