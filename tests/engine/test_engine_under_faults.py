"""One engine under faults of every kind, in any order."""

from collections.abc import Callable
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from transformers import PreTrainedModel

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.collector import GREEDY, Collector, random_prompt, run_staggered
from tests.engine.faults import (
    FaultyModel,
    broken_by,
    make_undecodable,
    out_of_memory_above,
)
from tests.engine.tiny_models import generate, load, make_engine, mistral, qwen2

MakeModel = Callable[[], PreTrainedModel]

BAD_ID = 40
POISON_ID = 41


def prompts() -> list[tuple[int, ...]]:
    """Return prompts, some with common prefixes."""
    random = Random(46)
    apart = [random_prompt(random, length) for length in (1, 2, 5, 9, 17, 30, 40)]
    return [*apart, (*apart[-1][:25], *apart[0]), (*apart[-1], *apart[3])]


@cache
def expected_tokens(make_model: MakeModel, prompt: tuple[int, ...], seed: int | None) -> list[int]:
    """Return the tokens of a sequence when nothing fails."""
    if seed is None:
        return generate(make_model, prompt, 12)
    request = SequenceRequest("alone", prompt, sampled(seed))
    return run_staggered(make_engine(load(make_model)), [request]).token_ids("alone")


def sampled(seed: int | None) -> SamplingParams:
    return GREEDY if seed is None else SamplingParams(seed=seed, top_p=0.9, max_tokens=12)


class FaultyEngine(RuleBasedStateMachine):
    """Adds, aborts, steps and faults in any order, on one engine.

    Some ids break the model, some yield NaN, some can't be decoded. Memory runs short and returns.
    Every other sequence gets the tokens of `generate`, and the invariants hold at all times.

    Attributes:
        make_model: Makes the model.
        tells_later: Whether the engine tells texts while the next step runs.
        reach: Most tokens after a bad one in a prompt. With more, a model with a sliding window
            would never notice the bad one.
    """

    make_model: MakeModel = staticmethod(qwen2)
    reach = 1000
    tells_later = False

    def __init__(self) -> None:
        super().__init__()
        loaded = load(self.make_model)
        with torch.no_grad():
            loaded.model.get_parameter("model.embed_tokens.weight")[POISON_ID] = torch.nan
        self.undecodable = set(range(200, 210))
        make_undecodable(loaded, self.undecodable)
        self.most_tokens = 1000
        self.model = FaultyModel(loaded, self.fault)
        engine = make_engine(loaded, max_num_seqs=5, memory=2)
        self.collector = Collector(engine, tells_later=self.tells_later)
        self.added: dict[str, tuple[SequenceRequest, int | None]] = {}
        self.aborted: set[str] = set()

    def fault(self, token_ids: list[int]) -> Exception | None:
        return out_of_memory_above(self.most_tokens)(token_ids) or broken_by([BAD_ID])(token_ids)

    @rule(
        given=st.lists(
            st.tuples(
                st.sampled_from(prompts()),
                st.none() | st.integers(0, 3),
                st.sampled_from([None, None, None, None, BAD_ID, POISON_ID]),
            ),
            min_size=2,
            max_size=6,
        )
    )
    def add_several(self, given: list[tuple[tuple[int, ...], int | None, int | None]]) -> None:
        for prompt, seed, bad_id in given:
            place = max(len(prompt) // 2, len(prompt) - self.reach)
            self.add(prompt if bad_id is None else (*prompt[:place], bad_id, *prompt[place:]), seed)

    def add(self, prompt: tuple[int, ...], seed: int | None) -> None:
        name = f"s{len(self.added)}"
        request = SequenceRequest(name, prompt, sampled(seed))
        self.added[name] = (request, seed)
        self.collector.engine.add(request)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        running = sorted(self.collector.engine._sequences)
        if running:
            name = data.draw(st.sampled_from(running))
            self.aborted.add(name)
            self.collector.engine.abort(name)

    @rule(num_steps=st.integers(1, 8), most_tokens=st.sampled_from([1, 2, 3, 8, 1000, 1000]))
    def step(self, num_steps: int, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        for _ in range(num_steps):
            if self.collector.engine.has_work:
                self.collector.step()
                self.collector.engine.check()

    @invariant()
    def invariants_hold(self) -> None:
        self.collector.engine.check()

    def teardown(self) -> None:
        self.collector.run()
        for name in self.added:
            self.assert_right(name)

    def assert_right(self, name: str) -> None:
        """Compare a sequence's tokens with the expected ones."""
        request, seed = self.added[name]
        got = self.collector.token_ids(name) if name in self.collector.deltas else []
        if {BAD_ID, POISON_ID} & set(request.prompt_token_ids):
            assert got == []
            assert name in self.aborted or self.error(name) in (
                "the model failed on this sequence",
                "no token can be chosen: the logits are not finite",
            )
            return
        due, has_failed = self.until_a_fault(
            expected_tokens(self.make_model, request.prompt_token_ids, seed)
        )
        if name in self.aborted:
            assert got == due[: len(got)]
        else:
            assert got == due
            assert (self.error(name) is not None) == has_failed

    def until_a_fault(self, token_ids: list[int]) -> tuple[list[int], bool]:
        """Return the tokens up to the first fault, and whether there is one."""
        for i, token_id in enumerate(token_ids):
            if token_id in self.undecodable:
                return token_ids[:i], True
            if token_id in (BAD_ID, POISON_ID) and i + 1 < len(token_ids):
                return token_ids[: i + 1], True
        return token_ids, False

    def error(self, name: str) -> str | None:
        return self.collector.deltas[name][-1].error


class FaultyRings(FaultyEngine):
    """The same with layers that overwrite old tokens with new ones, and texts that are told later.

    So a text may turn out to be undecodable while the next step runs.
    """

    make_model = staticmethod(mistral)
    reach = 5
    tells_later = True


# No shrinking: it would run for minutes.
SETTINGS = settings(
    max_examples=20,
    stateful_step_count=15,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)

TestFaultyEngine = pytest.mark.slow(FaultyEngine.TestCase)
TestFaultyEngine.settings = SETTINGS
TestFaultyRings = pytest.mark.slow(FaultyRings.TestCase)
TestFaultyRings.settings = SETTINGS
