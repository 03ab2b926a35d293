"""A grammar in the engine: what it allows, when it ends, and what it must not touch."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from deployments.engine.output import FinishReason
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.sequence import SequenceRequest
from tests.engine.collector import Collector, run_staggered
from tests.engine.tiny_models import (
    llama,
    load,
    make_engine,
)

PROMPT = (60, 61, 62)
COLORS: Any = {"enum": ["red", "green", "blue"]}


def json_grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(
        json.dumps(schema), overrides={"whitespace_flexible": False}
    )


def run(schema: Any, **params: Any) -> Collector:
    grammar = json_grammar(schema)
    request = SequenceRequest("s", PROMPT, SamplingParams(grammar=grammar, **params))
    return run_staggered(make_engine(load(llama)), [request])


def text_of(collector: Collector, name: str = "s") -> str:
    return "".join(delta.text for delta in collector.deltas[name])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_what_the_grammar_allows_and_ends_with_it(temperature: float) -> None:
    collector = run(COLORS, temperature=temperature, max_tokens=40, seed=3)
    assert json.loads(text_of(collector)) in COLORS["enum"]
    assert collector.deltas["s"][-1].finish_reason is FinishReason.STOP
