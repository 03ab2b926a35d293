from collections.abc import Callable, Sequence
from random import Random

import pytest
from transformers import PreTrainedModel

from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.collector import GREEDY, image_request, random_prompt, sized_image_request
from tests.engine.layouts import LAYOUTS, soak_unless
from tests.engine.scenarios import SCENARIOS, Scenario, run
from tests.engine.tiny_models import MODELS, gemma3, generate, load, qwen2_5_vl

pytestmark = pytest.mark.slow

MakeModel = Callable[[], PreTrainedModel]


def check(scenario: Scenario, make_model: MakeModel, requests: Sequence[SequenceRequest]) -> None:
    expected = {
        request.sequence_id: generate(
            make_model, request.prompt_token_ids, 12, request.model_inputs
        )
        for request in requests
    }
    got = run(scenario, load(make_model), requests, expected)
    assert len(got) > 2
    assert got == {name: expected[name] for name in got}


STAGGERED = "staggered arrivals"
CASES = [
    pytest.param(
        make_model,
        scenario,
        id=f"{name}-{what}",
        marks=() if what == STAGGERED else soak_unless(name, LAYOUTS),
    )
    for name, make_model in MODELS.items()
    for what, scenario in SCENARIOS.items()
]
"""All families run traced, with rows of all kinds; the other scenarios are the scheduler's part."""


@pytest.mark.parametrize(("make_model", "scenario"), CASES)
def test_greedy_tokens_equal_generate(make_model: MakeModel, scenario: Scenario) -> None:
    random = Random(1)
    requests = [
        SequenceRequest(f"s{i}", random_prompt(random, length), GREEDY)
        for i, length in enumerate((20, 1, 60, 5, 9, 33))
    ]
    check(scenario, make_model, requests)


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
@pytest.mark.parametrize(
    ("make_model", "request_of"),
    [(gemma3, image_request), (qwen2_5_vl, sized_image_request)],
    ids=["gemma3", "qwen2_5_vl"],
)
def test_images_and_text_together_equal_generate(
    make_model: MakeModel, request_of: Callable[..., SequenceRequest], scenario: Scenario
) -> None:
    random = Random(5)
    requests = [
        request_of(f"i{i}", random, num_images)
        if num_images
        else SequenceRequest(f"t{i}", random_prompt(random, 30), GREEDY)
        for i, num_images in enumerate((1, 0, 2, 1, 0))
    ]
    check(scenario, make_model, requests)


@pytest.mark.parametrize("make_model", MODELS.values(), ids=MODELS)
def test_the_output_of_a_family_depends_on_the_prompt(make_model: MakeModel) -> None:
    random = Random(2)
    answers = [generate(make_model, random_prompt(random, 20), 12) for _ in range(4)]
    assert len({tuple(answer) for answer in answers}) == 4
    assert len({token_id for answer in answers for token_id in answer}) > 5
