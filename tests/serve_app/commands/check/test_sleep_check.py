"""What the check and the builder say of models that sleep."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.config import AutoscalingConfig
from ray.serve.schema import ServeApplicationSchema

from deployments.contract.model_spec import DEEP_SLEEP_AFTER_S, ModelConfig, ModelSpec
from deployments.replica import own_scaling
from serve_app.app import RefusedFileError, require_startable
from serve_app.commands.check.check import find_problems
from serve_app.commands.check.sleep_check import DOWNSCALE_DELAY_S, LOAD_POLICY, Sleep, sleep_of
from serve_app.config import AppConfig

SHIPPED = Path("serve_config.yaml").read_text()
KEY = "applications[0].args.models[0].deep_sleep_after_s"


def file_with(scaling: dict[str, Any], **entry: Any) -> dict[str, Any]:
    """Return the shipped file with keys of the first model's entry and `autoscaling_config`."""
    document: dict[str, Any] = copy.deepcopy(yaml.safe_load(SHIPPED))
    application = document["applications"][0]
    application["args"]["models"][0] |= entry
    application["deployments"][1]["autoscaling_config"] |= scaling
    return document


def problems(scaling: dict[str, Any], **entry: Any) -> list[str]:
    return find_problems(yaml.safe_dump(file_with(scaling, **entry)))


def test_a_model_that_may_be_stopped_has_a_deep_sleep() -> None:
    assert problems({"min_replicas": 0}, deep_sleep_after_s=60) == []
    assert problems({"min_replicas": 0}, deep_sleep_after_s=None) == []
    assert problems({"min_replicas": 0}) == problems({}) == []


@pytest.mark.parametrize(
    ("scaling", "entry", "message"),
    [
        ({}, {}, "Serve keeps the process of 'pydoc-chat': set `autoscaling_config: {min_repl"),
        (
            {"min_replicas": 0, "policy": {"policy_function": "ray.serve.autoscaling_policy:x"}},
            {},
            f"does not read it: set `policy: {{policy_function: {LOAD_POLICY}}}`",
        ),
        ({"min_replicas": 0}, {"light_sleep_after_s": None}, "the model never sleeps lightly"),
        ({"min_replicas": 0}, {"device": "cuda"}, "the model never sleeps lightly"),
    ],
)
def test_a_deep_sleep_that_never_comes_is_refused_with_what_to_write(
    scaling: dict[str, Any], entry: dict[str, Any], message: str
) -> None:
    found = problems(scaling, deep_sleep_after_s=60, **entry)
    assert any(message in each for each in found), found
    if not entry:
        (problem,) = found
        assert problem.startswith(f"{KEY}: ")


def test_the_builder_refuses_the_same_before_anything_is_stopped() -> None:
    application = file_with({}, deep_sleep_after_s=60)["applications"][0]
    config = AppConfig.model_validate(application["args"])
    file = ServeApplicationSchema.model_validate(application)
    with pytest.raises(RefusedFileError, match="Serve keeps the process of 'pydoc-chat'"):
        require_startable(config, [], [file])


POLICY = {"policy": {"policy_function": LOAD_POLICY}}


@pytest.mark.parametrize(
    ("scaling", "entry", "expected"),
    [
        ({"min_replicas": 1, **POLICY}, {}, Sleep(None, None)),
        ({"min_replicas": 1}, {"light_sleep_after_s": 7}, Sleep(7.0, None)),
        (
            {"min_replicas": 0, "downscale_to_zero_delay_s": 300, **POLICY},
            {},
            Sleep(300.0, DEEP_SLEEP_AFTER_S),
        ),
        ({"min_replicas": 0, "downscale_delay_s": 30, **POLICY}, {}, Sleep(30, 900)),
        ({"min_replicas": 0, **POLICY}, {"deep_sleep_after_s": None}, Sleep(600.0, None)),
        ({"min_replicas": 0, **POLICY}, {"light_sleep_after_s": None}, Sleep(None, 600.0)),
        ({"min_replicas": 0}, {}, Sleep(None, 600.0)),
    ],
)
def test_a_file_says_when_a_model_sleeps(
    scaling: dict[str, Any], entry: dict[str, Any], expected: Sleep
) -> None:
    spec = ModelSpec(ModelConfig(id="m", source="nowhere", **entry), "nowhere", 0)
    assert sleep_of(spec, {"name": "m", "autoscaling_config": scaling}) == expected


@pytest.mark.parametrize(
    ("sleep", "told"),
    [
        (Sleep(None, None), ""),
        (Sleep(None, 300.0), "ends its process after 300 s without use"),
        (Sleep(60.0, None), "sleeps lightly after 60 s without use"),
        (
            Sleep(60.0, 900.0),
            "sleeps lightly after 60 s without use, and ends its process 900 s later, or as soon "
            "as memory is short",
        ),
    ],
)
def test_a_plan_tells_it_in_words(sleep: Sleep, told: str) -> None:
    assert str(sleep) == told


def test_what_is_read_here_is_what_serve_and_replicas_read() -> None:
    assert AutoscalingConfig().downscale_delay_s == DOWNSCALE_DELAY_S
    assert own_scaling.LOAD_POLICY == LOAD_POLICY
