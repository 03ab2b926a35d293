from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest
import ray
from ray.serve._private.common import (
    DeploymentStatus,
    DeploymentStatusInfo,
    DeploymentStatusTrigger,
    ReplicaState,
)
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, DeploymentStatusOverview

from serve_app.backends.models import cluster_state
from serve_app.backends.models.cluster_state import states_in, unnamed_state
from serve_app.backends.models.serving_states import DeploymentState, ServingState
from serve_app.placement import Demand
from tests.offenders import for_each


@for_each(
    (DeploymentStatus.HEALTHY, {ReplicaState.RUNNING: 2}, ServingState.RUNNING),
    (DeploymentStatus.HEALTHY, {}, ServingState.ASLEEP),  # Serve wants no replica
    (DeploymentStatus.UNHEALTHY, {ReplicaState.STARTING: 1}, ServingState.DOWN),
    (
        DeploymentStatus.UNHEALTHY,
        {ReplicaState.RUNNING: 1, ReplicaState.STARTING: 1},
        ServingState.RUNNING,
    ),
    (DeploymentStatus.UPDATING, {}, ServingState.DOWN),
    (DeploymentStatus.UPSCALING, {ReplicaState.STARTING: 1}, ServingState.SCALING),
    (DeploymentStatus.DOWNSCALING, {ReplicaState.STOPPING: 1}, ServingState.SCALING),
    (DeploymentStatus.DEPLOY_FAILED, {ReplicaState.RUNNING: 0}, ServingState.FAILED),
)
def test_a_deployment_without_a_running_replica_is_down_if_it_should_have_one(
    status: DeploymentStatus, states: dict[ReplicaState, int], expected: ServingState
) -> None:
    found = states_of(status, states)["m"]
    assert (found.serving, found.status, found.message) == (expected, status.value, "why")
    assert found.num_replicas == {state.value: n for state, n in states.items() if n}


def test_states_of_replicas_may_come_as_strings() -> None:
    as_sent = cast("dict[ReplicaState, int]", {"RUNNING": 2, "STARTING": 1})
    found = states_of(DeploymentStatus.HEALTHY, as_sent)["m"]
    assert found.serving is ServingState.RUNNING
    assert found.num_replicas == {"RUNNING": 2, "STARTING": 1}


def test_a_wake_that_fails_has_failed() -> None:
    trigger = DeploymentStatusTrigger.REPLICA_STARTUP_FAILED
    found = states_of(DeploymentStatus.UNHEALTHY, {}, trigger)
    assert found["m"].serving is ServingState.FAILED


@pytest.mark.parametrize(
    ("status", "num_replicas", "failure", "expected"),
    [
        # The last file could not be built: what runs goes on, and what Serve restores, too.
        (DeploymentStatus.HEALTHY, 2, "typo", (ServingState.RUNNING, "typo")),
        (DeploymentStatus.UNHEALTHY, 0, "typo", (ServingState.DOWN, "typo")),
        # But Serve scales none of its models, so it wakes none.
        (DeploymentStatus.HEALTHY, 0, "typo", (ServingState.FAILED, "typo")),
        # A roll-out had failed before.
        (DeploymentStatus.DEPLOY_FAILED, 0, "typo", (ServingState.FAILED, "why")),
        (None, 0, "typo", (ServingState.DOWN, "typo")),
        # A file is being built.
        (DeploymentStatus.HEALTHY, 2, None, (ServingState.RUNNING, None)),
        (DeploymentStatus.HEALTHY, 0, None, (ServingState.ASLEEP, None)),
        (DeploymentStatus.DEPLOY_FAILED, 0, None, (ServingState.FAILED, "why")),
        (None, 0, None, (ServingState.DOWN, None)),
    ],
)
def test_a_deployment_that_serve_does_not_name_is_what_its_replicas_show(
    status: DeploymentStatus | None,
    num_replicas: int,
    failure: str | None,
    expected: tuple[ServingState, str | None],
) -> None:
    trigger = DeploymentStatusTrigger.UNSPECIFIED
    info = None if status is None else DeploymentStatusInfo("m", status, trigger, "why")
    found = unnamed_state(info, num_replicas, failure)
    assert (found.serving, found.message if found.failure else None) == expected
    assert found.num_replicas == ({"RUNNING": num_replicas} if num_replicas else {})


def states_of(
    status: DeploymentStatus,
    states: dict[ReplicaState, int],
    trigger: DeploymentStatusTrigger = DeploymentStatusTrigger.UNSPECIFIED,
) -> Mapping[str, DeploymentState]:
    deployment = DeploymentStatusOverview(
        status=status, status_trigger=trigger, replica_states=states, message="why"
    )
    application = ApplicationStatusOverview(
        status=ApplicationStatus.RUNNING,
        message="",
        last_deployed_time_s=0,
        deployments={"m": deployment},
    )
    return states_in(application)


def test_what_running_applications_reserve_is_what_serve_wants_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deployment(wanted: int, **options: float) -> dict[str, Any]:
        config = {"ray_actor_options": options}
        return {"deployment_config": config, "target_num_replicas": wanted}

    deployments = {
        "m": deployment(2, num_cpus=0.5, num_gpus=1),
        "Plain": deployment(1),
        "None": deployment(1, num_cpus=0),
        "spread": deployment(1, num_cpus=0.5, num_gpus=0),
    }
    bundles = [{"CPU": 0.5, "GPU": 1.0}, {"GPU": 1.0}]
    deployments["spread"]["deployment_config"]["placement_group_bundles"] = bundles
    details = {"applications": {"a": {"deployments": deployments}, "building": {}}}
    asked = SimpleNamespace(get_serve_instance_details=SimpleNamespace(remote=lambda: details))
    client = SimpleNamespace(_controller=asked)
    monkeypatch.setattr(cluster_state, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(ray, "get", lambda found, timeout: found)
    spread = Demand("spread", 1, 0.5, 2.0, is_spread=True)
    assert cluster_state.running_demands() == {
        "a": [Demand("m", 2, 0.5, 1.0), Demand("Plain", 1, 1.0), Demand("None", 1, 0.0), spread],
        "building": [],
    }


@for_each(
    (1, None, True),
    (1, "m", True),
    (1, "other", False),
    (0, "m", False),
)
async def test_a_model_is_wanted_unless_serve_wants_none_or_another_has_the_turn(
    wanted: int, holder: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = {"target_num_replicas": wanted, "replicas": []}
    details = {"applications": {"a": {"deployments": {"m": deployment}}}}
    asked = SimpleNamespace(get_serve_instance_details=SimpleNamespace(remote=lambda: details))
    client = SimpleNamespace(_controller=asked)
    monkeypatch.setattr(cluster_state, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(ray, "get", lambda found, timeout: found)
    monkeypatch.setattr(cluster_state, "read_holder", lambda app, group: holder)
    assert (await cluster_state.serve_replicas("a", "m", "card")).is_any_wanted is expected
    is_wanted = (await cluster_state.serve_replicas("a", "m")).is_any_wanted
    assert is_wanted is (wanted > 0), "it takes no turns"


def test_files_that_a_silent_controller_does_not_tell_are_missed_only_where_they_have_to_be_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def silent(asked: object, timeout: float) -> object:
        raise ray.exceptions.GetTimeoutError

    asked = SimpleNamespace(remote=lambda: None)
    client = SimpleNamespace(_controller=SimpleNamespace(get_app_configs=asked))
    monkeypatch.setattr(cluster_state, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(ray, "get", silent)
    assert cluster_state.deployed_files() == ()
    with pytest.raises(ray.exceptions.RayError):
        cluster_state.deployed_files(has_to_answer=True)
