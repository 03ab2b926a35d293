r"""Answers under any regular expression match it as a whole, by Python's own `re`.

The expressions mean the same to Rust's crate, which llguidance uses, and to Python. Left out is
what differs: `\w`, `\d`, `\s` and `(?i)`, whose tables of characters are of different versions
of Unicode; sets within sets (`[a&&b]`, `[a--b]`, `[[a]]`), which only Rust has; and `$` before a
last line end, which only Python has, and which no full match uses.
"""

import re
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.contract.output import FinishReason
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import load_model
from deployments.engine.scheduling.sequence import SequenceRequest
from serve_app.api.structured.answer_grammar import GrammarSettings, serialized
from serve_app.api.structured.client_grammar import regex_part
from serve_app.config import LimitsConfig
from tests.engine.collector import Collector

FOLDER = Path(__file__).resolve().parents[4] / "models/pydoc-chat"
SETTINGS = GrammarSettings(LimitsConfig())
NUM_BATCHES = 25
NUM_TOGETHER = 20
MAX_TOKENS = 64
MIN_NUM_WHOLE = 300

ALPHABET = "abcXYZ019 _-.,:;*+?()[]{}^$|/\\\"'#&~<>=!@%éßñЖ中😀\n\t"


def escaped(text: str) -> str:
    special = {"\n": "\\n", "\t": "\\t"}
    return "".join(
        special.get(each) or (each if each.isalnum() or each in "_<>" else f"\\{each}")
        if each.isascii()
        else each
        for each in text
    )


TEXTS = st.text(st.sampled_from(ALPHABET), min_size=1, max_size=4).map(escaped)
RANGES = st.sampled_from(
    ["a-f", "0-9", "A-Z", "à-ü", "一-龥", "\u0430-\u044f", "xyz", "\\-_", "\\]\\[", "\\\\"]
)
CLASSES = st.tuples(st.sampled_from(["", "^"]), st.lists(RANGES, min_size=1, max_size=3)).map(
    lambda pair: f"[{pair[0]}{''.join(pair[1])}]"
)
BOUNDS = st.tuples(st.integers(0, 3), st.integers(0, 3)).map(lambda t: (t[0], sum(t)))
REPETITIONS = st.one_of(
    st.just("?"),
    st.integers(1, 4).map(lambda times: f"{{{times}}}"),
    BOUNDS.map(lambda bounds: f"{{{bounds[0]},{bounds[1]}}}"),
)


def _combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    grouped = st.tuples(st.sampled_from(["(?:", "("]), inner).map(lambda t: f"{t[0]}{t[1]})")
    several = st.lists(grouped, min_size=2, max_size=3)
    return st.one_of(
        grouped,
        several.map("".join),
        several.map("|".join).map(lambda alternatives: f"(?:{alternatives})"),
        st.tuples(grouped, REPETITIONS, st.sampled_from(["", "?"])).map("".join),
    )


REGEXES = st.tuples(
    st.sampled_from(["", "^"]),
    st.recursive(st.one_of(TEXTS, CLASSES, st.just(".")), _combined, max_leaves=8),
    st.sampled_from(["", "$"]),
).map("".join)


@pytest.fixture(scope="module")
def engine() -> Engine:
    loaded = load_model(str(FOLDER), revision=None, dtype="float32", device=torch.device("cpu"))
    made = Engine(loaded, EngineLimits(NUM_TOGETHER, 256, 128))
    made.warm_up()
    return made


def _request(name: str, regex: str, seed: int) -> SequenceRequest:
    grammar = serialized("start: @regex\n", [regex_part(regex, "regex", SETTINGS, "regex")])
    params = SamplingParams(temperature=1.5, seed=seed, max_tokens=MAX_TOKENS, grammar=grammar)
    return SequenceRequest(name, (2, 105, 300, 500), params)


@pytest.mark.slow
def test_an_answer_that_stops_by_itself_matches_its_regular_expression(engine: Engine) -> None:
    num_whole = num_asked = 0

    @settings(
        max_examples=NUM_BATCHES,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.lists(REGEXES, min_size=NUM_TOGETHER, max_size=NUM_TOGETHER), st.integers(0, 2**31))
    def hold(regexes: list[str], seed: int) -> None:
        nonlocal num_whole, num_asked
        collector = Collector(engine)
        for at, regex in enumerate(regexes):
            engine.add(_request(str(at), regex, seed))
        collector.run()
        for at, regex in enumerate(regexes):
            num_asked += 1
            reason = collector.finish_reason(str(at))
            assert reason in (FinishReason.STOP, FinishReason.LENGTH), collector.deltas[str(at)][-1]
            if reason is FinishReason.STOP:
                num_whole += 1
                text = collector.text(str(at))
                assert re.fullmatch(regex, text), f"{text!r} does not match {regex!r}"

    hold()
    assert num_asked >= NUM_BATCHES * NUM_TOGETHER
    assert num_whole >= MIN_NUM_WHOLE
