from typing import Any

import pytest

from serve_app import deployed_apps
from serve_app.commands.check.compose import BUILDER
from serve_app.commands.check.turns import TURN_POLICY
from serve_app.config import AppConfig
from serve_app.deployed_apps import resolve_num_cpus, turn_groups_of
from serve_app.gpu_shares import to_spec
from serve_app.placement import Demand
from tests.serve_app.deployed_file import ARGS, deployed
from tests.serve_app.fake_nodes import Cluster


@pytest.mark.parametrize(
    ("num_replicas", "num_cpus", "expected"),
    [(1, "auto", 1.0), (3, "auto", 0.5), (30, "auto", 0.05), (30, 0.7, 0.7)],
)
def test_num_cpus_auto_is_what_fits_on_the_cluster_when_the_file_is_deployed(
    num_replicas: int, num_cpus: float | str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployed_apps, "running_demands", dict)
    args = {"models": [{**ARGS["models"][0], "num_cpus": num_cpus}]}
    config = AppConfig.model_validate(args)
    section = {"name": "a--m", "num_replicas": num_replicas}
    file = deployed(None, args=args, deployments=[section])
    specs = {"a/m": to_spec(config.models[0], 0.0)}
    found = resolve_num_cpus(config, specs, [file], None, nodes=Cluster())
    assert found == {"a--m": expected}


def entry(num_cpus: float | str = "auto", **keys: Any) -> dict[str, Any]:
    return {"models": [{**ARGS["models"][0], "num_cpus": num_cpus, **keys}]}


FOREIGN = {"import_path": "x:app", "args": {}}
ONE_CORE = Demand("Any", 1, 1.0)


@pytest.mark.parametrize(
    ("others", "running", "expected"),
    [
        # The builder of each file has the same number for all that are `auto`.
        ([{"args": entry(max_model_len=9)}], {}, 0.5),
        ([{"args": entry(1.5)}], {}, 0.1),
        ([{"args": entry(1.2)}, {"args": entry(max_model_len=9)}], {}, 0.1),
        ([{**FOREIGN, "deployments": [{"name": "X"}]}], {}, 0.5),
        # What runs is counted as it is.
        ([FOREIGN], {"b0": [ONE_CORE]}, 0.5),
        ([{"args": entry(max_model_len=9)}], {"b0": [Demand("a--m", 1, 1.0)]}, 0.5),
        ([], {"elsewhere": [ONE_CORE]}, 0.5),
        # Its own replicas make room for the new ones.
        ([], {"mine": [Demand("a--m", 1, 1.0), ONE_CORE]}, 1.0),
    ],
)
@pytest.mark.parametrize("has_file", [True, False])
def test_num_cpus_auto_leaves_room_for_other_applications(
    others: list[dict[str, Any]],
    running: dict[str, list[Demand]],
    expected: float,
    has_file: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deployed_apps, "running_demands", lambda: running)
    config = AppConfig.model_validate(entry())
    ours = {"import_path": BUILDER, "deployments": []}
    files = [deployed(None, **{**ours, "name": f"b{i}", **each}) for i, each in enumerate(others)]
    if has_file:
        files.append(deployed(None, **ours, name="mine", args=entry()))
    specs = {"a/m": to_spec(config.models[0], 0.0)}
    found = resolve_num_cpus(config, specs, files, None, nodes=Cluster())
    assert found == {"a--m": expected}


IDS = ("a", "b", "c")
OF_THREE = {"models": [{**ARGS["models"][0], "id": id_} for id_ in IDS]}


def application(name: str, *group: str, args: Any = OF_THREE, light: bool = True) -> Any:
    """Return an application of a file, with a group of models that take turns."""
    kwargs = {"groups": {"cpu": group}, "light": ["cpu"] if light else []}
    policy = {"policy_function": TURN_POLICY, "policy_kwargs": kwargs}
    return deployed(None, name=name, args=args, autoscaling_policy=policy)


def test_two_applications_with_the_same_args_and_light_groups_know_them() -> None:
    files = [application("x", "a", "b"), application("y", "b", "a")]
    found = turn_groups_of(AppConfig.model_validate(OF_THREE), files)
    assert found == {"a": "cpu", "b": "cpu"}


@pytest.mark.parametrize(
    "other",
    [
        deployed(None, name="y", args=OF_THREE),
        application("y", "b", "c"),
        application("y", "a", "b", light=False),
    ],
)
def test_two_applications_with_the_same_args_and_other_light_groups_are_refused(other: Any) -> None:
    args, light = AppConfig.model_validate(OF_THREE), application("x", "a", "b")
    for files in ([light, other], [other, light]):
        with pytest.raises(ValueError, match="have the same `args:`, but other `light` groups"):
            turn_groups_of(args, files)


def test_the_light_groups_of_an_application_with_other_args_are_not_ours() -> None:
    files = [application("x", "a", "b", args={"models": OF_THREE["models"][:2]})]
    assert turn_groups_of(AppConfig.model_validate(OF_THREE), files) == {}
