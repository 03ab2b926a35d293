"""A model that says what a test has written, in files that any engine serves.

Each token of its script leads to one other, whatever came before. Its chat template ends a prompt
with a token for the number of turns that the model has had, so it says another thing in each. It
calls tools of its own accord, as models do that are trained for it. Where it has no script, as in
the arguments that a grammar asks for, it says as little as it may.
"""

import math
from collections.abc import Mapping, Sequence
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
COMMON: Final = 0.5
"""What all embeddings share, of their length."""

SHARPNESS: Final = 10.0
"""By which the logit of the next token of the script is 98, and at most about half of it behind the
tokens before which it does not come."""

ENDS: Final = {END: 13.0, '"': 12.0, "}": 11.0, "]": 10.0}
"""What comes where the script has no next token, by which logits are 74 to 57: the first of these
that may."""

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
        turns: The texts of each turn's tokens, up to its end. No token may be there twice.
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
    pairs = [(vocabulary[a], vocabulary[b]) for chain in chains for a, b in pairwise(chain)]
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
            eos_token_id=vocabulary[END],
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call] # left untyped
        eos_token_id=vocabulary[END]
    )
    with torch.no_grad():
        _chain(model, pairs, {vocabulary[text]: weight for text, weight in ENDS.items()})
    model.save_pretrained(folder)
    return folder


def _chain(
    model: LlamaForCausalLM, pairs: Sequence[tuple[int, int]], ends: Mapping[int, float]
) -> None:
    """Let the layer add nothing to a token's embedding, and that name the next token."""
    (layer,) = model.model.layers
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    own = torch.nn.functional.normalize(torch.randn(len(model.lm_head.weight), WIDTH - 1))
    common = torch.full((len(own), 1), COMMON)
    embeddings = torch.cat([common, own * math.sqrt(1 - COMMON**2)], dim=1)
    model.model.embed_tokens.weight.copy_(embeddings * math.sqrt(WIDTH))
    logits = model.lm_head.weight.zero_()
    for token_id, next_id in pairs:
        logits[next_id, 1:] += SHARPNESS * own[token_id]
    for token_id, weight in ends.items():
        logits[token_id, 0] = weight
