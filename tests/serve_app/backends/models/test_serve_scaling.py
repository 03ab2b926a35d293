import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from deployments.autoscaling import OperatorWish, WishKeys
from deployments.contract.errors import ModelConflictError, ReplicaUnavailableError
from serve_app.backends.models import serve_scaling
from serve_app.backends.models.operator_actions import Scaling
from serve_app.backends.models.serve_scaling import (
    LOAD_POLICY,
    MAY_CHANGE,
    NOTHING_CHANGED,
    TURN_POLICY,
    ServeScaling,
    group_in,
    scaling_in,
)
from serve_app.backends.replicas.running_replicas import ReplicaFacts, RunningReplicas
from tests.deadline import DEADLINE_S
from tests.failing import failing
from tests.stopped_clock import Clock

pytestmark = [pytest.mark.in_time, pytest.mark.usefixtures("advance")]

PINNED = OperatorWish(is_pinned=True)


def scaled(min_replicas: int, policy: str | None = None) -> dict[str, Any]:
    """Return what Serve's controller says of a deployment that it scales."""
    scaling = {"min_replicas": min_replicas, "policy": policy and {"policy_function": policy}}
    return {"deployment_config": {"autoscaling_config": scaling}}


def application(**deployments: Mapping[str, Any]) -> dict[str, Any]:
    """Return what it says of an application, in which `a` and `org/b` take turns."""
    policy = {"policy_function": TURN_POLICY, "policy_kwargs": {"groups": {"g": ["a", "org/b"]}}}
    return {"deployments": deployments, "deployed_app_config": {"autoscaling_policy": policy}}


def scaling(
    monkeypatch: pytest.MonkeyPatch, found: Mapping[str, Any], **wishes: OperatorWish
) -> ServeScaling:
    """Return the scaling of an application of which the controller says this."""
    made = ServeScaling("app", {name: RunningReplicas() for name in found.get("deployments", {})})
    monkeypatch.setattr(made, "_details", lambda: found)
    monkeypatch.setattr(
        serve_scaling,
        "read_wishes",
        lambda _, names: {name: wishes.get(name, OperatorWish()) for name in names},
    )
    return made


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_replicas": 3}, Scaling(3)),
        ({}, Scaling(1)),
        (scaled(0)["deployment_config"], Scaling(0)),
        (scaled(0, "others:Policy")["deployment_config"], Scaling(0)),
        (scaled(2, LOAD_POLICY)["deployment_config"], Scaling(2, has_load_policy=True)),
    ],
)
def test_how_serve_scales_a_deployment(config: dict[str, Any], expected: Scaling) -> None:
    assert scaling_in({"deployments": {"m": {"deployment_config": config}}}, "m") == expected


def test_a_group_is_found_by_the_names_of_deployments() -> None:
    assert group_in(application(), "org--b") == {"a": 1.0, "org--b": 1.0}
    assert group_in(application(), "c") == {}
    assert group_in({"deployed_app_config": None}, "a") == {}


async def test_a_pin_is_the_models_own_or_that_of_one_that_takes_turns_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = application(a=scaled(0, LOAD_POLICY), **{"org--b": scaled(0, LOAD_POLICY)})
    asked = scaling(monkeypatch, both, a=PINNED)
    assert await asked.scaling_of("a") == Scaling(0, has_load_policy=True, is_pinned=True)
    assert await asked.scaling_of("org--b") == Scaling(0, has_load_policy=True, pinned_rival="a")


async def test_a_pin_is_a_rival_only_of_models_that_do_not_fit_beside_all_that_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = {"g": {"a": 0.5, "b": 0.3, "c": 0.2, "d": 0.4}}
    found = application(**dict.fromkeys("abcd", scaled(0, LOAD_POLICY)))
    found["deployed_app_config"]["autoscaling_policy"]["policy_kwargs"]["groups"] = groups
    asked = scaling(monkeypatch, found, a=PINNED, b=PINNED)
    rivals = {name: (await asked.scaling_of(name)).pinned_rival for name in "abcd"}
    assert rivals == {"a": None, "b": None, "c": None, "d": "a"}


@pytest.mark.parametrize("found", [{}, application()])
async def test_a_model_that_serve_does_not_scale_now_is_no_silence_of_rays(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, Any]
) -> None:
    with pytest.raises(ModelConflictError, match="is being deployed, or could not be"):
        await scaling(monkeypatch, found).scaling_of("m")


async def test_a_controller_that_is_silent_has_changed_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = scaling(monkeypatch, application(a=scaled(0)))
    monkeypatch.setattr(asked, "_details", failing(RuntimeError("it is gone")))
    with pytest.raises(ReplicaUnavailableError) as raised:
        await asked.scaling_of("a")
    assert raised.value.message == NOTHING_CHANGED
    assert "it is gone" in caplog.text


async def test_the_actions_undo_no_simultaneous_one_but_an_end_by_a_pin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored: dict[bytes, bytes] = {}
    monkeypatch.setattr(
        serve_scaling, "_internal_kv_put", lambda key, value, **_: stored.update({key: value})
    )
    monkeypatch.setattr(serve_scaling, "_internal_kv_del", lambda key, **_: stored.pop(key, None))
    replicas = RunningReplicas()
    replicas.replace([ReplicaFacts("r", None)])
    asked = ServeScaling("app", {"a": replicas})

    def wish() -> OperatorWish:
        return WishKeys.of("app", "a").read(stored)

    ending = frozenset({"r"})
    assert await asked.end("a")
    assert wish() == OperatorWish(ending=ending)
    await asked.unpin("a")
    assert wish() == OperatorWish(ending=ending)
    await asked.pin("a")
    assert wish() == PINNED
    # Both had looked before the pin: one puts the model to sleep, one wakes it.
    assert await asked.end("a")
    assert wish() == OperatorWish(is_pinned=True, ending=ending)
    await asked.keep("a")
    assert wish() == PINNED
    await asked.unpin("a")
    assert wish() == OperatorWish()


@pytest.mark.parametrize("action", ["pin", "unpin", "keep"])
async def test_a_store_that_is_silent_may_have_changed_something(
    monkeypatch: pytest.MonkeyPatch, advance: Clock, action: str
) -> None:
    begun, may_write, written = (threading.Event() for _ in range(3))

    def write(*_: object, **__: object) -> None:
        begun.set()
        may_write.wait()
        written.set()

    monkeypatch.setattr(serve_scaling, "_internal_kv_put", write)
    monkeypatch.setattr(serve_scaling, "_internal_kv_del", write)
    asked = scaling(monkeypatch, application(a=scaled(0)))
    acting = asyncio.ensure_future(getattr(asked, action)("a"))
    try:
        assert await asyncio.to_thread(begun.wait, DEADLINE_S)
        advance(serve_scaling.TIMEOUT_S)
        with pytest.raises(ReplicaUnavailableError) as raised:
            await acting
        assert raised.value.message == MAY_CHANGE
        assert not written.is_set()
    finally:
        may_write.set()
    assert await asyncio.to_thread(written.wait, DEADLINE_S)
