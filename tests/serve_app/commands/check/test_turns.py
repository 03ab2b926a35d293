"""What the check and the builder say of models that take turns."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeApplicationSchema

from deployments.turns import TurnPolicy
from serve_app.app import RefusedFileError, require_startable
from serve_app.commands.check.check import find_problems
from serve_app.commands.check.turns import TURN_POLICY, TurnPolicyConfig
from serve_app.config import AppConfig

SHIPPED = Path("serve_config.yaml").read_text()
KWARGS = "applications[0].autoscaling_policy.policy_kwargs"
BOTH = ["pydoc-chat", "pydoc-detector"]


def file_with(min_replicas: int | None = 0, **kwargs: Any) -> dict[str, Any]:
    """Return the shipped file with an application whose models take turns."""
    document: dict[str, Any] = copy.deepcopy(yaml.safe_load(SHIPPED))
    application = document["applications"][0]
    application["autoscaling_policy"] = {"policy_function": TURN_POLICY, "policy_kwargs": kwargs}
    for section in application["deployments"][1:]:
        if min_replicas is not None:
            section["autoscaling_config"]["min_replicas"] = min_replicas
        else:
            del section["autoscaling_config"]
    return document


def problems(**given: Any) -> list[str]:
    return find_problems(yaml.safe_dump(file_with(**given)))


def test_a_right_file_has_no_problem() -> None:
    assert problems(groups={"gpu": BOTH}, min_turn_s=10, max_start_s=60) == []


@pytest.mark.parametrize(
    ("kwargs", "path", "message"),
    [
        ({}, ".groups", "Field required"),
        ({"groups": {"gpu": BOTH[:1]}}, ".groups.gpu", "at least 2 items"),
        ({"groups": {"gpu": BOTH}, "min_turn_s": 0}, ".min_turn_s", "greater than 0"),
        ({"groups": {"gpu": BOTH}, "min_turns": 9}, "", "did you mean 'min_turn_s'?"),
        (
            {"groups": {"gpu": ["pydoc-chat", "pydoc-detectr"]}},
            ".groups.gpu",
            "no model has the id 'pydoc-detectr': did you mean 'pydoc-detector'?",
        ),
        (
            {"groups": {"one": BOTH, "two": ["pydoc-search", "pydoc-chat"]}},
            ".groups.two",
            "'pydoc-chat' is in one and in two",
        ),
        ({"groups": {"gpu": [*BOTH, BOTH[0]]}}, ".groups.gpu", "'pydoc-chat' is twice in gpu"),
    ],
)
def test_a_mistake_is_named_with_its_place(kwargs: Any, path: str, message: str) -> None:
    (problem,) = problems(**kwargs)
    assert problem.startswith(f"{KWARGS}{path}: ")
    assert message in problem


@pytest.mark.parametrize("min_replicas", [1, None])
def test_a_model_that_serve_can_not_stop_takes_no_turns(min_replicas: int | None) -> None:
    found = problems(groups={"gpu": BOTH}, min_replicas=min_replicas)
    assert len(found) == 2
    for id_, problem in zip(BOTH, found, strict=True):
        assert f"{id_!r} takes turns" in problem
        assert "min_replicas: 0" in problem


def test_the_builder_refuses_the_same_before_anything_is_stopped() -> None:
    application = file_with(groups={"gpu": [BOTH[0], "unknown"]})["applications"][0]
    config = AppConfig.model_validate(application["args"])
    file = ServeApplicationSchema.model_validate(application)
    with pytest.raises(RefusedFileError, match=r"groups\.gpu: no model has the id 'unknown'"):
        require_startable(config, [], [file])


def test_the_policy_takes_the_arguments_that_the_check_does() -> None:
    TurnPolicy(**TurnPolicyConfig(groups={"gpu": ("a", "b")}).model_dump())
