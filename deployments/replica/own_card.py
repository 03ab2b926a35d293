"""The card of a light group: all models of one have to be on the same GPU.

Each of them reserves a part of the card, and has the memory of all of these parts in its turn. Ray
fills cards one after another, but promises no deployment the card of another one, and Serve gives
each replica a placement group of its own. So each member says where it is before it loads, and one
that is elsewhere does not start: what it would use there, Ray could give to others.
"""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

import ray
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.runtime_context import get_runtime_context

from deployments.compute.card_room import wait_for_room
from deployments.contract.model_spec import ModelSpec
from deployments.device.device import MemoryDevice
from deployments.plan.memory_budget import HEADROOM
from deployments.replica.own_actor import own_actor_name

logger = logging.getLogger("ray.serve.raystream.replica")

NAMESPACE: Final = b"raystream-turn-cards"
"""Of the members' cards, in the key-value store of Ray's control service."""


class OtherCardError(RuntimeError):
    """This replica is not on the card of its light group."""


@dataclass(frozen=True, slots=True)
class Member:
    """Where a replica of a light group is.

    Attributes:
        model: Its model's id.
        actor: The name of its actor.
        card: The node and Ray's id of the GPU there.
    """

    model: str
    actor: str
    card: str


class Members(Protocol):
    """What the replicas of all light groups say of themselves."""

    def note(self, group: str, member: Member) -> None:
        """Replace what an earlier replica of the same model has said."""
        ...

    def of(self, group: str) -> Iterator[Member]:
        """Yield the members of a group that live."""
        ...

    def forget(self, group: str, model: str) -> None:
        """Forget what a replica of this model has said."""
        ...


class StoredMembers:
    """The members in Ray's key-value store; see `Members`."""

    def note(self, group: str, member: Member) -> None:
        """See `Members`."""
        value = json.dumps([member.model, member.actor, member.card]).encode()
        _internal_kv_put(_key(group, member.model), value, namespace=NAMESPACE)

    def of(self, group: str) -> Iterator[Member]:
        """See `Members`."""
        for key in _internal_kv_list(_key(group, ""), namespace=NAMESPACE):
            value = _internal_kv_get(key, namespace=NAMESPACE)
            if value is not None:
                member = Member(*json.loads(value))
                if _lives(member.actor):
                    yield member

    def forget(self, group: str, model: str) -> None:
        """See `Members`."""
        _internal_kv_del(_key(group, model), namespace=NAMESPACE)


def require_own_card(spec: ModelSpec) -> None:
    """Refuse to start on another GPU than the other members of a light group; do nothing elsewhere.

    Raises:
        OtherCardError: A member that lives is on another one.
    """
    name = own_actor_name()
    if spec.turn_group is None or not spec.num_gpus or name is None:
        return
    context = get_runtime_context()
    gpus = context.get_accelerator_ids()["GPU"]
    # The actor's name begins with the application's, in which the group's name is unique.
    group = f"{name.partition('#')[0]}#{spec.turn_group}"
    card = f"GPU {', '.join(gpus)} of node {context.get_node_id()}"
    join(StoredMembers(), group, Member(spec.id, name, card))


def join(members: Members, group: str, own: Member) -> None:
    """Say where a replica is, and refuse if another member is elsewhere.

    It says so before it looks. So of two that start at the same time one at least sees the other.

    Args:
        members: The members of all groups.
        group: The group.
        own: The replica.

    Raises:
        OtherCardError: A member that lives is on another card.
    """
    members.note(group, own)
    other = next((each for each in members.of(group) if each.card != own.card), None)
    if other is None:
        return
    members.forget(group, own.model)
    raise OtherCardError(
        f"{own.model} takes light turns with {other.model} on one card, but Ray has placed it on "
        f"{own.card}, and {other.model} on {other.card}: let no others share the group's card, and "
        "keep its models on one node, by `resources` in their `ray_actor_options` or "
        "`RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1`; or take the group out of `light`"
    )


def wait_for_share(
    device: MemoryDevice, share: float, wait: Callable[[Callable[[], bool]], bool] = wait_for_room
) -> bool:
    """Wait until a GPU has as much free memory as a share of it plans with, but not for long.

    Contexts of models that sleep may keep it from ever being as free. The load begins all the same,
    and is planned with what is free.

    Args:
        device: The device; another one than a GPU is not asked.
        share: The share.
        wait: Waits until there is room.

    Returns:
        Whether there is room.
    """
    if device.torch_device.type == "cpu":
        return True
    needed_bytes = device.total_bytes * share * (1 - HEADROOM)
    has_room = wait(lambda: device.total_bytes - device.foreign_bytes >= needed_bytes)
    if not has_room:
        logger.warning("the card has less room than a share of %g: others use it", share)
    return has_room


def _key(group: str, model: str) -> bytes:
    return f"{group}#{model}".encode()


def _lives(actor: str) -> bool:
    try:
        ray.get_actor(actor, namespace=get_runtime_context().namespace)
    except ValueError:  # it is dead, or was never there
        return False
    return True
