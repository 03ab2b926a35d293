"""What a replica asks about its own deployment: who scales it, and how and when it ends."""

from types import SimpleNamespace

import pytest
import ray
from ray import serve
from ray.serve import context
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.constants import DEFAULT_GRACEFUL_SHUTDOWN_TIMEOUT_S
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ReplicaRank

from deployments.autoscaling import OperatorWish
from deployments.replica import own_scaling
from deployments.replica.own_scaling import (
    graceful_shutdown_timeout_s,
    is_pinned,
    is_scaled_by_calls,
    is_stopped,
)
from tests.failing import failing


def be_replica(monkeypatch: pytest.MonkeyPatch, scaling: AutoscalingConfig | None) -> None:
    """Be a replica whose deployment has been sent as Serve sends it."""
    sent = DeploymentConfig(autoscaling_config=scaling).to_proto_bytes()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    monkeypatch.setattr(context, "_INTERNAL_REPLICA_CONTEXT", None)
    context._set_internal_replica_context(
        replica_id=ReplicaID("tests", DeploymentID("m", "tests")),
        servable_object=object,
        _deployment_config=DeploymentConfig.from_proto_bytes(sent),
        rank=ReplicaRank(rank=0, node_rank=0, local_rank=0),
        world_size=1,
    )


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"policy_function": "deployments.autoscaling:LoadPolicy"}, False),
        (
            {
                "policy_function": "deployments.autoscaling:LoadPolicy",
                "policy_kwargs": {"target_busy": 0.7},
            },
            False,
        ),
        ({"policy_function": "ray.serve.autoscaling_policy:default_autoscaling_policy"}, True),
        ({}, True),
    ],
)
def test_all_policies_but_our_own_count_serve_s_calls(
    monkeypatch: pytest.MonkeyPatch, policy: dict[str, object], expected: bool
) -> None:
    made = AutoscalingPolicy(**policy)  # type: ignore[no-untyped-call] # Ray leaves it untyped
    given = AutoscalingConfig(min_replicas=1, max_replicas=2, policy=made)
    be_replica(monkeypatch, given)
    assert is_scaled_by_calls() is expected


def test_a_fixed_number_of_replicas_and_a_process_without_serve_need_no_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    be_replica(monkeypatch, None)
    assert not is_scaled_by_calls()
    monkeypatch.setattr(context, "_INTERNAL_REPLICA_CONTEXT", None)
    assert not is_scaled_by_calls()


@pytest.mark.parametrize("wish", [OperatorWish(is_pinned=True), OperatorWish()])
async def test_a_replica_reads_whether_an_operator_has_pinned_its_own_model(
    monkeypatch: pytest.MonkeyPatch, wish: OperatorWish
) -> None:
    be_replica(monkeypatch, None)
    wishes = {("tests", "m"): wish}
    monkeypatch.setattr(own_scaling, "read_wish", lambda *names: wishes[names])
    assert await is_pinned() is wish.is_pinned


async def test_a_model_counts_as_pinned_while_that_can_not_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    be_replica(monkeypatch, None)
    monkeypatch.setattr(own_scaling, "read_wish", failing(TimeoutError("no answer")))
    assert await is_pinned()
    assert "m: whether it is pinned can't be read: TimeoutError('no answer')" in caplog.text


async def test_no_model_is_pinned_without_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "_INTERNAL_REPLICA_CONTEXT", None)  # earlier tests may leave one
    monkeypatch.setattr(own_scaling, "read_wish", failing(AssertionError()))
    assert not await is_pinned()


@pytest.mark.parametrize(
    ("states", "expected"),
    [({"r": "STOPPING"}, True), ({"r": "STARTING", "s": "STOPPING"}, False), ({}, False)],
)
def test_a_replica_that_starts_asks_whether_serve_stops_it(
    monkeypatch: pytest.MonkeyPatch, states: dict[str, str], expected: bool
) -> None:
    be_replica(monkeypatch, None)
    own_id = serve.get_replica_context().replica_id.unique_id
    replicas = [
        {"replica_id": {"r": own_id}.get(name, name), "state": state}
        for name, state in states.items()
    ]
    details = {"applications": {"tests": {"deployments": {"m": {"replicas": replicas}}}}}
    asked = SimpleNamespace(get_serve_instance_details=SimpleNamespace(remote=lambda: details))
    client = SimpleNamespace(_controller=asked)
    monkeypatch.setattr(own_scaling, "_get_global_client", lambda **_: client)
    monkeypatch.setattr(ray, "get", lambda found, timeout: found)
    assert is_stopped() is expected


def test_a_replica_that_starts_goes_on_while_the_controller_is_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    be_replica(monkeypatch, None)
    monkeypatch.setattr(own_scaling, "_get_global_client", failing(RayServeException("none")))
    assert not is_stopped()
    assert "can't be read" in caplog.text


@pytest.mark.parametrize("given_s", [7.0, None])
def test_a_stop_takes_as_long_as_the_file_says(
    monkeypatch: pytest.MonkeyPatch, given_s: float | None
) -> None:
    be_replica(monkeypatch, None)
    if given_s is None:
        monkeypatch.setattr(context, "_INTERNAL_REPLICA_CONTEXT", None)
    else:
        config = serve.get_replica_context()._deployment_config
        config.graceful_shutdown_timeout_s = given_s
    expected_s = DEFAULT_GRACEFUL_SHUTDOWN_TIMEOUT_S if given_s is None else given_s
    assert graceful_shutdown_timeout_s() == expected_s
