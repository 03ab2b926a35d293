import json
from dataclasses import replace
from itertools import count

import pytest
import torch

from deployments.contract.sampling_params import ReasoningTokens, SamplingParams
from deployments.engine.grammar.matcher import GrammarMatcher
from deployments.vllm_engine.grammars import envelope
from tests.engine.tiny_models import EOS_TOKEN_ID, byte_tokenizer
from tests.vllm_engine.in_process import InProcessEngine
from tests.vllm_engine.parameter_sets import GRAMMAR, MARKS, RANDOM

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BOUND = replace(RANDOM, grammar=GRAMMAR, max_tokens=60)
BUDGET = 6


@pytest.fixture(autouse=True)
def unharmed(engine: InProcessEngine) -> None:
    engine.harm = None


def cut_everywhere(engine: InProcessEngine, params: SamplingParams, text: list[int]) -> list[int]:
    """Return the cuts after which the text goes on differently."""
    for cut in range(1, len(text)):
        engine.add(str(cut), params, text[:cut])
    moved = engine.run()
    return [int(cut) for cut, other in moved.items() if other.token_ids != text]


def members(token_ids: list[int]) -> set[str]:
    """Return the members of the object that the tokens write."""
    return set(json.loads(str(byte_tokenizer().decode(token_ids))))


def test_a_text_follows_its_grammar_and_ends_with_it(engine: InProcessEngine) -> None:
    text = engine.run_all({"a": BOUND})["a"]
    assert members(text.token_ids) == {"a", "b"}
    assert text.finish_reason == "stop"
    assert EOS_TOKEN_ID not in text.token_ids


@pytest.mark.parametrize(
    "params", [BOUND, replace(BOUND, temperature=0), replace(BOUND, presence_penalty=1.0)]
)
def test_a_moved_text_goes_on_in_its_grammar(
    engine: InProcessEngine, params: SamplingParams
) -> None:
    text = engine.run_all({"a": params})["a"]
    assert cut_everywhere(engine, params, text.token_ids) == []


def test_a_preempted_text_goes_on_in_its_grammar(engine: InProcessEngine) -> None:
    expected = engine.run_all({"a": BOUND})["a"]
    engine.add("a", BOUND)

    def preempt(step: int) -> None:
        if step in (2, 5, 7, 11):
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)

    assert engine.run(preempt)["a"] == expected


@pytest.mark.parametrize("has_begun", [True, False])
def test_reasoning_is_not_bound_and_its_budget_holds_after_a_move(
    engine: InProcessEngine, has_begun: bool
) -> None:
    marks = replace(MARKS, has_begun=has_begun, max_tokens=BUDGET)
    # Without this bias, the tiny model would hardly choose the mark that begins the reasoning.
    params = replace(BOUND, reasoning=marks, logit_bias=((MARKS.start, 100.0),), seed=3)
    if has_begun:
        params = replace(params, logit_bias=())
    text = engine.run_all({"a": params})["a"].token_ids
    begun = 0 if has_begun else 1
    assert has_begun or text[0] == MARKS.start
    end = text.index(MARKS.end)
    assert end <= BUDGET + begun
    assert members(text[end + 1 :]) == {"a", "b"}
    assert cut_everywhere(engine, params, text) == []


def test_a_budget_without_a_grammar_holds_after_a_move(engine: InProcessEngine) -> None:
    marks = ReasoningTokens(MARKS.start, MARKS.end, has_begun=True, max_tokens=BUDGET)
    params = replace(RANDOM, reasoning=marks)
    text = engine.run_all({"a": params})["a"].token_ids
    assert MARKS.end in text[: BUDGET + 1]
    assert cut_everywhere(engine, params, text) == []


@pytest.mark.parametrize(
    "constraint",
    ["start: /(.|\\n)*/", envelope("{}"), envelope(GRAMMAR, given=[60, 61, 62])],
    ids=["no envelope", "no grammar", "tokens that violate it"],
)
def test_a_grammar_that_does_not_compile_ends_its_own_request(
    engine: InProcessEngine, constraint: str
) -> None:
    expected = engine.run_all({"other": RANDOM})["other"]
    engine.add("bad", BOUND, constraint=constraint)
    engine.add("other", RANDOM)
    texts = engine.run()
    assert (texts["bad"].finish_reason, texts["bad"].token_ids) == ("error", [])
    assert texts["other"] == expected


def test_a_matcher_that_raises_ends_its_own_request(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = engine.run_all({"other": RANDOM})["other"]
    bitmask, calls = GrammarMatcher.bitmask, count()

    def raising(self: GrammarMatcher, barred: frozenset[int] = frozenset()) -> torch.Tensor:
        if next(calls) == 4:  # the first one is the compiler's
            raise RuntimeError("a fault of the matcher")
        return bitmask(self, barred)

    monkeypatch.setattr(GrammarMatcher, "bitmask", raising)
    engine.add("bad", BOUND)
    engine.add("other", RANDOM)
    texts = engine.run()
    assert texts["bad"].finish_reason == "error"
    assert len(texts["bad"].token_ids) == 3
    assert texts["other"] == expected
