from typing import Any

import pytest

from deployments.contract.model_spec import ONGOING_MARGIN, ModelConfig
from serve_app.commands.check.queue_check import ingress_queue_problems, queue_problems
from serve_app.config import AppConfig

MODEL = ModelConfig(id="m", source="m", max_num_seqs=8, max_queued_requests=16, max_model_len=100)


def problems(deployment: dict[str, Any], **user_config: int) -> list[str]:
    return list(queue_problems(deployment, MODEL, user_config, "d"))


def test_ray_must_pass_on_what_the_model_admits_and_what_it_refuses() -> None:
    needed = 8 + 16 + ONGOING_MARGIN
    assert problems({"max_ongoing_requests": needed}) == []
    (problem,) = problems({"max_ongoing_requests": needed - 1})
    assert problem.startswith(f"d.max_ongoing_requests: {needed - 1} is less than {needed}")


def test_max_queued_requests_of_user_config_overrides_the_models_entry() -> None:
    needed = 8 + 20 + ONGOING_MARGIN
    assert problems({"max_ongoing_requests": needed}, max_queued_requests=20) == []
    assert len(problems({"max_ongoing_requests": needed}, max_queued_requests=21)) == 1
    assert problems({"max_ongoing_requests": needed - 20}, max_queued_requests=0) == []


@pytest.mark.parametrize(("limit", "num"), [(-1, 0), (0, 1), (100, 1)])
def test_rays_own_max_queued_requests_is_refused(limit: int, num: int) -> None:
    found = problems({"max_queued_requests": limit})
    assert len(found) == num
    assert all(problem.startswith("d.max_queued_requests: Ray counts") for problem in found)


def test_too_few_tokens_for_the_longest_request_are_refused() -> None:
    assert problems({}, max_queued_tokens=100) == []
    (problem,) = problems({}, max_queued_tokens=99)
    assert problem.startswith("d.user_config.max_queued_tokens: 99 is less than max_model_len")


def test_an_ingress_must_accept_what_all_models_admit() -> None:
    other = ModelConfig(id="o", source="o", max_num_seqs=2, max_queued_requests=0)
    config = AppConfig(models=(MODEL, other))
    needed = 8 + 16 + 2 + 2 * ONGOING_MARGIN
    assert list(ingress_queue_problems({"max_ongoing_requests": needed}, config, "i")) == []
    assert list(ingress_queue_problems({}, config, "i")) == []
    (problem,) = ingress_queue_problems({"max_ongoing_requests": needed - 1}, config, "i")
    assert problem.startswith(f"i.max_ongoing_requests: {needed - 1} is less than {needed}")
