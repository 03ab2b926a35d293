"""A model that says what a test has written, in files that any engine serves.

Each token of its script leads to one other, whatever came before. Its chat template ends a prompt
with a token for the number of turns that the model has had, so it says another thing in each. It
calls tools of its own accord, as models do that are trained for it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from tests.engines import ROOT

SOURCE: Final = ROOT / "models/pydoc-chat"
"""Whose tokenizer and template it has: they write calls of tools and their results."""

END: Final = "<end_of_turn>"
WIDTH: Final = 128
SHARPNESS: Final = 10.0
"""Other tokens than the next one have less than e^-50 of the probability, at temperature 1."""

CUE: Final = (
    "{%- if add_generation_prompt -%}"
    "{%- set past = messages | selectattr('role', 'equalto', 'assistant') | list -%}"
    "{{- '<turn ' ~ past | length ~ '>' -}}"
    "{%- endif -%}"
)


def call_of(name: str, arguments: str) -> str:
    """Return a call of a function as the model writes it; the arguments are JSON."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def save_scripted_model(
    folder: Path, turns: Sequence[Sequence[str]], max_model_len: int = 65536
) -> Path:
    """Save a model that says one turn after the other in each conversation.

    Args:
        folder: Where to save it.
        turns: The texts of each turn's tokens. No token may be there twice.
        max_model_len: Its length in tokens.
    """
    tokenizer = AutoTokenizer.from_pretrained(SOURCE)
    chains = [(f"<turn {at}>", *texts) for at, texts in enumerate(turns)]
    added = [text for chain in chains for text in chain]
    assert len(set(added)) == len(added), "each token leads to one other"
    assert not set(added) & tokenizer.get_vocab().keys(), "these are the tokenizer's own"
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in added])
    tokenizer.chat_template += CUE
    tokenizer.save_pretrained(folder)
    vocabulary = tokenizer.get_vocab()
    end_id = vocabulary[END]
    ids = [[*(vocabulary[text] for text in chain), end_id] for chain in chains]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=max_model_len,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=end_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call] # left untyped
        eos_token_id=end_id
    )
    with torch.no_grad():
        _chain(model, [pair for chain in ids for pair in pairwise(chain)])
    model.save_pretrained(folder)
    return folder


def _chain(model: LlamaForCausalLM, pairs: Sequence[tuple[int, int]]) -> None:
    """Let the layer add nothing to a token's embedding, and that name the next token."""
    (layer,) = model.model.layers
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    embeddings = torch.nn.functional.normalize(torch.randn(len(model.lm_head.weight), WIDTH))
    model.model.embed_tokens.weight.copy_(embeddings * math.sqrt(WIDTH))
    model.lm_head.weight.zero_()
    for token_id, next_id in pairs:
        model.lm_head.weight[next_id] += SHARPNESS * embeddings[token_id]
