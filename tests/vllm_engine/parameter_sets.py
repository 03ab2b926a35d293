"""Ten ways to choose tokens, and where their texts are cut."""

import atexit
from dataclasses import replace
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from deployments.contract.sampling_params import ReasoningTokens, SamplingParams
from tests.engine.tiny_models import EOS_TOKEN_ID, byte_tokenizer, wide_qwen2

NUM_TOKENS = 24
CUTS = (1, 7, 16, 23)
EVERY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0, seed=5)
RANDOM = replace(EVERY, temperature=1.0)
PARAMETER_SETS = {
    "greedy": EVERY,
    "seed": RANDOM,
    "temperature": replace(RANDOM, temperature=0.6, seed=2**62),
    "top_p": replace(RANDOM, top_p=0.8),
    "top_k and min_p": replace(RANDOM, top_k=40, min_p=0.05),
    "repetition": replace(EVERY, repetition_penalty=1.3),
    "presence": replace(RANDOM, presence_penalty=1.5),
    "frequency": replace(EVERY, frequency_penalty=0.7),
    "bias": replace(RANDOM, logit_bias=((60, 3.0), (61, -100.0))),
    "min_tokens": replace(
        RANDOM, min_tokens=20, stop_token_ids=frozenset(range(100, 200)), top_p=0.95
    ),
}
PROMPT = (50, 51, 52, 50, 90, 91)


@cache
def tiny_model_folder() -> Path:
    """Return the folder of a tiny random Qwen2."""
    folder = Path(mkdtemp(prefix="raystream-tiny-"))
    atexit.register(rmtree, folder, ignore_errors=True)
    wide_qwen2().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def stop_token_ids(params: SamplingParams) -> list[int]:
    """Return the tokens that end a text."""
    ignores_eos = params.ignore_eos and params.grammar is None
    return sorted(params.stop_token_ids | (frozenset() if ignores_eos else {EOS_TOKEN_ID}))


def json_grammar() -> str:
    """Return the grammar of an object with two members."""
    from llguidance import LLMatcher

    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["yes", "no"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    return str(LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False}))


GRAMMAR = json_grammar()
MARKS = ReasoningTokens(start=10, end=11)
