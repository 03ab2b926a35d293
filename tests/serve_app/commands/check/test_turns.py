"""What the check and the builder say of models that take turns."""

import copy
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import pytest
import yaml
from ray.serve.schema import ServeApplicationSchema

from deployments.turns import TurnPolicy
from serve_app.app import RefusedFileError, require_startable
from serve_app.commands.check.check import find_problems
from serve_app.commands.check.preflight import Depth, examine
from serve_app.commands.check.turns import TURN_POLICY, TurnPolicyConfig, light_groups_in
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


def light_file(light: list[str], **section: Any) -> dict[str, Any]:
    """Return a file of two models that generate and take turns as a light group.

    Args:
        light: The groups that are light.
        section: Keys of the second model's section, or of its `autoscaling_config`; the keys
            `light_sleep_after_s` and `num_gpus` are of its entry.
    """
    document = file_with(groups={"cpu": ["pydoc-chat", "second"]}, light=light)
    application = document["applications"][0]
    entry = application["args"]["models"][0]
    entry["light_sleep_after_s"] = 60
    own = {key: section.pop(key) for key in ("light_sleep_after_s", "num_gpus") if key in section}
    application["args"]["models"].append(entry | {"id": "second"} | own)
    first = application["deployments"][1]
    first["autoscaling_config"]["max_replicas"] = 1
    second = copy.deepcopy(first) | {"name": "second"}
    second["autoscaling_config"] |= section.pop("autoscaling_config", {})
    application["deployments"].append(second | section)
    return document


def test_a_right_file_has_no_problem() -> None:
    assert problems(groups={"gpu": BOTH}, min_turn_s=10, max_start_s=60) == []
    assert problems(groups={"gpu": {BOTH[0]: 0.3, BOTH[1]: 0.8}}) == []


def test_the_check_says_which_models_have_turns_at_the_same_time() -> None:
    parts = {BOTH[0]: 0.5, BOTH[1]: 0.5, "pydoc-search": 0.9}
    found = examine(yaml.safe_dump(file_with(groups={"gpu": parts})), Depth.MACHINE)
    assert [each for each in found.notes if each.startswith(KWARGS)] == [
        f"{KWARGS}.groups.gpu: models that have turns at the same time: pydoc-chat with "
        "pydoc-detector, or pydoc-search"
    ]
    alone = examine(yaml.safe_dump(file_with(groups={"gpu": BOTH})), Depth.MACHINE)
    assert not any(each.startswith(KWARGS) for each in alone.notes)


def test_the_sets_of_models_that_fit_together_are_the_largest_ones() -> None:
    parts = {"a": 0.5, "b": 0.3, "c": 0.2, "d": 0.6}
    groups: dict[str, Any] = {"mixed": parts, "whole": [*ascii_lowercase]}
    turns = TurnPolicyConfig(groups=groups)
    sets = {frozenset(each) for each in turns.together["mixed"]}
    assert sets == {frozenset("abc"), frozenset("bd"), frozenset("cd")}
    assert turns.together["whole"] == [(each,) for each in ascii_lowercase]


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
        ({"groups": {"gpu": [*BOTH, BOTH[0]]}}, ".groups.gpu", "'pydoc-chat' is twice in it"),
        ({"groups": {"gpu": "pydoc-chat"}}, ".groups.gpu", "write a list of ids, or the part of"),
        ({"groups": {"gpu": [1, 2]}}, ".groups.gpu", "write a list of ids, or the part of each"),
        ({"groups": {"gpu": {BOTH[0]: 0.5}}}, ".groups.gpu", "at least 2 items"),
        (
            {"groups": {"gpu": {BOTH[0]: 0.5, BOTH[1]: 1.5}}},
            ".groups.gpu.pydoc-detector",
            "less than or equal to 1",
        ),
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
    groups: dict[str, Any] = {"cpu": ["a", "b"], "gpu": {"c": 0.5, "d": 0.5, "e": 1}}
    TurnPolicy(**TurnPolicyConfig(groups=groups, light=("cpu",)).model_dump())


def test_models_that_sleep_lightly_between_their_turns_are_right_as_they_are() -> None:
    assert find_problems(yaml.safe_dump(light_file(["cpu"]))) == []
    heavy = light_file([], light_sleep_after_s=None, max_surge_percent=100)
    assert find_problems(yaml.safe_dump(heavy)) == [], "only a light group needs more"


def test_models_of_a_light_group_have_no_parts() -> None:
    document = light_file(["cpu"])
    kwargs = document["applications"][0]["autoscaling_policy"]["policy_kwargs"]
    kwargs["groups"]["cpu"] = {"pydoc-chat": 0.5, "second": 0.5}
    (problem,) = find_problems(yaml.safe_dump(document))
    assert problem.startswith(f"{KWARGS}.light: of the light group 'cpu' one model at a time")


@pytest.mark.parametrize(
    ("light", "section", "message"),
    [
        (["cpus"], {}, ".light: no group is called 'cpus': did you mean 'cpu'?"),
        (
            ["cpu"],
            {"light_sleep_after_s": None},
            ".light: 'second', of the group 'cpu', sleeps lightly while another model has the "
            "turn, and can't or may not: take `light_sleep_after_s: null` out of its entry",
        ),
        (
            ["cpu"],
            {"num_gpus": 0.5},
            ".light: the models of the light group 'cpu' use the same part of one GPU, one at a "
            "time: write the same number in each entry, such as `num_gpus: 1`",
        ),
        (
            ["cpu"],
            {"autoscaling_config": {"max_replicas": 2}},
            ".light: 'second', of the group 'cpu', keeps one replica, and may have 2: write "
            "`max_replicas: 1` in the section of deployments named 'second'",
        ),
        (
            ["cpu"],
            {"max_surge_percent": 50},
            ".light: 'second', of the group 'cpu', would start a new replica before the old one "
            "gives its memory back, which never ends: take `max_surge_percent` out",
        ),
    ],
)
def test_what_a_light_group_lacks_is_said_with_how_to_mend_it(
    light: list[str], section: dict[str, Any], message: str
) -> None:
    (problem,) = find_problems(yaml.safe_dump(light_file(light, **section)))
    assert problem.startswith(f"{KWARGS}{message}")


def test_models_of_a_light_group_on_a_gpu_say_their_part_of_it_and_when_they_sleep() -> None:
    document = light_file(["cpu"])
    entries = document["applications"][0]["args"]["models"]
    for entry in (entries[0], entries[-1]):
        entry |= {"num_gpus": 1, "quantization": None}
    assert find_problems(yaml.safe_dump(document)) == []
    del entries[-1]["light_sleep_after_s"]
    (problem,) = find_problems(yaml.safe_dump(document))
    assert problem.startswith(
        f"{KWARGS}.light: 'second', of the group 'cpu', sleeps lightly on a GPU only if its entry "
        "says so: write `light_sleep_after_s: 60`"
    )


def with_a_pooler(**entry: Any) -> list[str]:
    """Return what is wrong with a light group of a model that generates and one that classifies."""
    document = file_with(groups={"cpu": BOTH}, light=["cpu"])
    application = document["applications"][0]
    for section in application["deployments"][1:]:
        section["autoscaling_config"]["max_replicas"] = 1
    for model in application["args"]["models"]:
        if model["id"] == BOTH[1]:
            model |= entry
    return [*find_problems(yaml.safe_dump(document))]


def test_a_light_group_takes_models_that_classify_or_embed_on_a_cpu() -> None:
    assert with_a_pooler() == []
    assert with_a_pooler(light_sleep_after_s=60) == []
    (problem,) = with_a_pooler(device="cuda")
    assert problem == (
        f"{KWARGS}.light: 'pydoc-detector', of the group 'cpu', classifies or embeds, and takes "
        "light turns only on a CPU: write `device: cpu` and `num_gpus: 0` in its entry, take it "
        "out of the group, or the group out of `light`"
    )


def test_a_light_group_takes_no_model_of_vllm() -> None:
    document = light_file(["cpu"])
    document["applications"][0]["args"]["models"][-1] |= {"engine": "vllm", "quantization": None}
    found = [each for each in find_problems(yaml.safe_dump(document)) if "turns" in each]
    assert len(found) == 1
    assert found[0].startswith(f"{KWARGS}.light: 'second', of the group 'cpu', is vLLM's, which ")


def test_the_builder_refuses_a_light_group_that_lacks_something_too() -> None:
    application = light_file(["cpu"], max_surge_percent=50)["applications"][0]
    config = AppConfig.model_validate(application["args"])
    file = ServeApplicationSchema.model_validate(application)
    with pytest.raises(RefusedFileError, match="take `max_surge_percent` out"):
        require_startable(config, [], [file])


def test_only_right_light_groups_are_told() -> None:
    (application,) = light_file(["cpu"])["applications"]
    assert light_groups_in(application) == {"cpu": ("pydoc-chat", "second")}
    (heavy,) = light_file([])["applications"]
    (wrong,) = file_with(groups={"cpu": BOTH[:1]}, light=["cpu"])["applications"]
    assert light_groups_in(heavy) == light_groups_in(wrong) == light_groups_in({}) == {}
