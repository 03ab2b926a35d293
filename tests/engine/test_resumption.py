"""An answer lost after any of its tokens and continued by another engine is the same to the bit.

Token ids, text, log-probabilities and finish reason are compared with those of an undisturbed run,
in which the sequence was alone, its prompt was prefilled at once and every other token decoded. The
engine that continues it runs others beside it and prefills in chunks.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from llguidance import LLMatcher

from deployments.compute.cpu.attention.row_attention import can_attend_rows
from deployments.contract.output import TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, prepare_model
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan.processor import has_bfloat16
from tests.engine.collector import image_request, random_prompt, sized_image_request
from tests.engine.tiny_models import EOS_TOKEN_ID, MODELS, SHAPE, byte_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_traces")]

NUM_INDICES = 65
MAX_MODEL_LEN = 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Without AVX512_BF16 torch computes bfloat16, and not alike in all batches. `auto` avoids it there.
if not has_bfloat16():
    del DTYPES["bfloat16"]

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 70}},
    "required": ["a"],
    "additionalProperties": False,
}
LETTERS = tuple(byte_tokenizer()("abcdefghijklmnopqrstuvwxyz")["input_ids"])
ONLY_LETTERS = tuple((token_id, 60.0) for token_id in LETTERS)

LONG = SamplingParams(
    temperature=0, max_tokens=NUM_INDICES + 5, ignore_eos=True, top_logprobs=2, seed=3
)
DRAWN = replace(LONG, temperature=0.9, top_p=0.95)

KINDS: Mapping[str, SamplingParams] = {
    "greedy": LONG,
    "seeded": DRAWN,
    "JSON schema": replace(
        DRAWN,
        grammar=LLMatcher.grammar_from_json_schema(
            json.dumps(SCHEMA), overrides={"whitespace_flexible": False}
        ),
    ),
    "regex": replace(DRAWN, grammar=LLMatcher.grammar_from_regex("([a-f]{2,9}[.] ){20}")),
    "min_tokens": replace(
        DRAWN, min_tokens=NUM_INDICES + 1, ignore_eos=False, logit_bias=((EOS_TOKEN_ID, 20.0),)
    ),
    "penalties": replace(
        DRAWN, presence_penalty=0.8, frequency_penalty=0.4, repetition_penalty=1.3
    ),
    "logit_bias": replace(DRAWN, logit_bias=ONLY_LETTERS),
    "top_k, min_p": replace(DRAWN, top_k=20, min_p=0.02, top_logprobs=5),
    "stop string": replace(DRAWN, logit_bias=ONLY_LETTERS),
    "image": LONG,
    "sized image": LONG,
}

IMAGES: Mapping[str, tuple[str, Callable[..., SequenceRequest]]] = {
    "image": ("gemma3", image_request),
    "sized image": ("qwen2_5_vl", sized_image_request),
}
"""The family of each kind with images, and what makes its prompt."""


@cache
def loaded(family: str, dtype: str) -> LoadedModel:
    model = MODELS[family]().to(DTYPES[dtype])  # type: ignore[arg-type] # transformers' own type
    prepare_model(model)
    return LoadedModel(model, byte_tokenizer(), None, frozenset({EOS_TOKEN_ID}))


@cache
def lone_engine(family: str, dtype: str) -> Engine:
    limits = EngineLimits(1, MAX_MODEL_LEN, MAX_MODEL_LEN, prefix_caching=False)
    engine = Engine(loaded(family, dtype), limits)
    engine.warm_up()
    return engine


@cache
def crowded_engine(family: str, dtype: str) -> Engine:
    engine = Engine(loaded(family, dtype), EngineLimits(16, MAX_MODEL_LEN, 90))
    engine.warm_up()
    return engine


def request_of(kind: str, family: str, dtype: str) -> SequenceRequest:
    """Return a request whose answer has more than NUM_INDICES tokens."""
    random = Random(8)
    if kind in IMAGES:
        _, make = IMAGES[kind]
        return make("s", random, 2, KINDS[kind])
    request = SequenceRequest("s", random_prompt(random, 21), KINDS[kind])
    if kind == "stop string":
        answer = "".join(delta.text for delta in undisturbed(request, family, dtype))
        params = replace(request.params, stop=(answer[NUM_INDICES - 3 : NUM_INDICES + 2],))
        return replace(request, params=params)
    return request


def undisturbed(request: SequenceRequest, family: str, dtype: str) -> list[TextDelta]:
    engine = lone_engine(family, dtype)
    engine.add(request)
    deltas = []
    while engine.has_work:
        deltas += [delta for _, delta in engine.step()]
    return deltas


def cut(request: SequenceRequest, name: str, received: list[TextDelta]) -> SequenceRequest:
    """Return the request for the rest of an answer."""
    token_ids = tuple(token_id for delta in received for token_id in delta.token_ids)
    return replace(request, sequence_id=name, generated_token_ids=token_ids, is_resumed=True)


def continued(
    engine: Engine, lost: Mapping[str, tuple[SequenceRequest, list[TextDelta]]]
) -> Iterator[TextDelta]:
    """Continue answers that arrive in turn; yield each as a whole, in the same order."""
    answers = {name: [*received] for name, (_, received) in lost.items()}
    waiting = [cut(request, name, received) for name, (request, received) in lost.items()]
    while waiting or engine.has_work:
        for _ in waiting[:3]:
            engine.add(waiting.pop())
        for name, delta in engine.step():
            answers[name].append(delta)
    engine.check()
    yield from map(joined, answers.values())


def joined(deltas: list[TextDelta]) -> TextDelta:
    return replace(TextDelta.join(deltas), num_cached_tokens=0)


def family_of(kind: str) -> str:
    return IMAGES[kind][0] if kind in IMAGES else "qwen2"


# What a kind replays does not depend on the dtype, so one of two runs a few kinds only.
CASES = [
    (kind, family_of(kind), dtype)
    for dtype in DTYPES
    for kind in KINDS
    if dtype == [*DTYPES][-1] or kind in ("greedy", "stop string", *IMAGES)
]
cases = pytest.mark.parametrize(("kind", "family", "dtype"), CASES)


@cases
def test_an_answer_lost_after_any_token_is_continued_to_the_last_bit(
    kind: str, family: str, dtype: str
) -> None:
    request = request_of(kind, family, dtype)
    whole = undisturbed(request, family, dtype)
    assert len(whole) >= NUM_INDICES
    lost = {f"{index}": (request, whole[:index]) for index in range(NUM_INDICES)}
    expected = joined(whole)
    for index, found in enumerate(continued(crowded_engine(family, dtype), lost)):
        assert found == expected, f"lost after {index} tokens"


@cases
def test_an_answer_lost_again_while_it_is_resumed_is_continued_to_the_last_bit(
    kind: str, family: str, dtype: str
) -> None:
    request = request_of(kind, family, dtype)
    whole = undisturbed(request, family, dtype)
    engine = crowded_engine(family, dtype)
    lost = {}
    for index in range(0, NUM_INDICES, 3):
        received = whole[:index]
        engine.add(cut(request, "second", received))
        for _ in range(index % 4):  # the first of these steps may only prefill
            received = received + [delta for _, delta in engine.step()]
        engine.abort("second")
        lost[f"{index}"] = request, received
    expected = joined(whole)
    for found in continued(engine, lost):
        assert found == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family", sorted(MODELS.keys() - {"qwen3_moe", "mixtral", "gpt_oss", "gpt2"})
)
def test_company_changes_no_bit(family: str, dtype: str) -> None:
    random = Random(4)
    requests = [
        SequenceRequest(f"s{i}", random_prompt(random, length), replace(LONG, max_tokens=12))
        for i, length in enumerate((20, 1, 60, 5, 9, 33))
    ]
    engine = Engine(loaded(family, dtype), EngineLimits(3, MAX_MODEL_LEN, 24))
    lone = Engine(loaded(family, dtype), EngineLimits(1, MAX_MODEL_LEN, 128, prefix_caching=False))
    found: dict[str, list[TextDelta]] = {request.sequence_id: [] for request in requests}
    expected: dict[str, list[TextDelta]] = {name: [] for name in found}
    for request in requests:
        engine.add(request)
        lone.add(request)
        while lone.has_work:
            expected[request.sequence_id] += [delta for _, delta in lone.step()]
    while engine.has_work:
        for name, delta in engine.step():
            found[name].append(delta)
    assert {n: joined(d) for n, d in found.items()} == {n: joined(d) for n, d in expected.items()}


def test_the_models_of_these_tests_have_the_kernel() -> None:
    for dtype in DTYPES.values():
        head_dim = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]
        assert can_attend_rows(head_dim, dtype)
