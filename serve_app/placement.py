"""Where replicas fit: the cores and GPUs that they reserve, against those of nodes.

The builder asks it what `num_cpus: auto` is on the cluster, and `raystream check`, `plan` and
`serve` whether this machine can hold what a file asks for. Ray itself would wait for room for ever.
Nothing here imports Ray.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

from deployments.contract.model_spec import (
    TOLERANCE,
    deployment_name_of,
    number,
    part_of_turn,
)
from serve_app.config import INGRESS_NAME, LEDGER_NAME, AppConfig

INGRESS_NUM_CPUS: Final = 0.2
"""What Ray reserves for the ingress if the file says nothing; Ray's own default is a whole core."""

DESCRIBING_NUM_CPUS: Final = 0.01
"""What a deployment that only answers a question now and then reserves. Not 0, with which Ray would
also take a node that is to hold no replicas, such as a head."""

AUTO_NUM_CPUS: Final = (1.0, 0.5, 0.25, 0.1, 0.05, 0.02, 0.01)
"""What `num_cpus: auto` may be. There are few values, so that a changed file seldom changes it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What the replicas of one deployment reserve.

    Attributes:
        name: The deployment's name.
        number: How many replicas there are.
        num_cpus: Cores of each; None for what fits.
        num_gpus: GPUs of each: a share of one, or a whole number.
        num_turns: Models that take turns on the cores of one, and divide them, if they are chosen.
        is_spread: Whether the GPUs of a replica may be on several nodes, its cores beside one.
    """

    name: str
    number: int
    num_cpus: float | None
    num_gpus: float = 0.0
    num_turns: int = 1
    is_spread: bool = False

    def of_auto(self, value: float) -> float:
        """Return the cores of each replica if `auto` is so much."""
        return part_of_turn(value, self.num_turns)


@dataclass(frozen=True, slots=True)
class Node:
    """The cores and GPUs of a node."""

    num_cpus: float
    num_gpus: int = 0


class _Room:
    """What is left of a node."""

    def __init__(self, node: Node) -> None:
        self.cpus = node.num_cpus
        self.gpus = [1.0] * node.num_gpus

    def take(self, num_cpus: float, num_gpus: float) -> bool:
        """Take what one replica reserves; return whether there is room for it."""
        if num_cpus > self.cpus + TOLERANCE:
            return False
        if num_gpus > 1:
            whole = [i for i, free in enumerate(self.gpus) if free == 1.0][: ceil(num_gpus)]
            if len(whole) < num_gpus:
                return False
            for i in whole:
                self.gpus[i] = 0.0
        elif num_gpus > 0:
            fitting = [i for i, free in enumerate(self.gpus) if num_gpus <= free + TOLERANCE]
            if not fitting:
                return False
            self.gpus[min(fitting, key=self.gpus.__getitem__)] -= num_gpus
        self.cpus -= num_cpus
        return True


def fits(demands: Iterable[Demand], nodes: Sequence[Node]) -> bool:
    """Return whether all replicas have room on the nodes; `auto` counts as the least it may be."""
    rooms = [_Room(node) for node in nodes]
    given = [part for demand in demands for _ in range(demand.number) for part in _parts_of(demand)]
    for num_gpus, num_cpus in sorted(given, reverse=True):
        # What needs no GPU goes to nodes without one first, and the largest room is taken first.
        by_room = sorted(rooms, key=lambda room: (bool(room.gpus), -room.cpus))
        if not any(room.take(num_cpus, num_gpus) for room in by_room):
            return False
    return True


def _parts_of(demand: Demand) -> Iterator[tuple[float, float]]:
    """Yield the GPUs and cores of each part of a replica that has to be on one node."""
    least = demand.of_auto(AUTO_NUM_CPUS[-1]) if demand.num_cpus is None else demand.num_cpus
    if not demand.is_spread:
        yield demand.num_gpus, least
        return
    yield 1.0, least
    for _ in range(int(demand.num_gpus) - 1):
        yield 1.0, 0.0


def choose_num_cpus(
    demands: Sequence[Demand], nodes: Sequence[Node], running: Mapping[str, float]
) -> dict[str, float]:
    """Return what `num_cpus: auto` is for each deployment that has it.

    What runs keeps what it has, if the others fit beside it: another value would restart it.

    Args:
        demands: All deployments of the file, and of other applications on the nodes.
        nodes: The nodes that the cluster has now; if they have no cores, others will come.
        running: What replicas that run now have, by deployment.
    """
    free = [demand for demand in demands if demand.num_cpus is None]
    least = {demand.name: demand.of_auto(AUTO_NUM_CPUS[-1]) for demand in free}
    if not any(node.num_cpus for node in nodes):
        return {demand.name: demand.of_auto(AUTO_NUM_CPUS[0]) for demand in free}
    kept = {name: running[name] for name in least if running.get(name)}
    for held in (kept, {}) if kept else ({},):
        for value in AUTO_NUM_CPUS:
            chosen = {each.name: held.get(each.name, each.of_auto(value)) for each in free}
            if fits((replace(d, num_cpus=chosen.get(d.name, d.num_cpus)) for d in demands), nodes):
                return chosen
    return least


def demands_of(
    config: AppConfig,
    deployments: Iterable[Mapping[str, Any]],
    shares: Mapping[str, float],
    *,
    has_ledger: bool,
    most: int | None = None,
    light_groups: Iterable[Sequence[str]] = (),
) -> list[Demand]:
    """Return what the replicas of an application reserve.

    Args:
        config: Its `args:`.
        deployments: Its `deployments:`, each with the keys that the file gives.
        shares: The share of a GPU of each replica, by the model's id; models without one have none.
        has_ledger: Whether keys have limits, which a replica of its own counts.
        most: Count as many replicas as a deployment may grow to, up to this many; None counts
            those that it starts with.
        light_groups: The ids of models that take turns and keep their replicas meanwhile. So all of
            a group have to fit beside each other, and divide what one of them would reserve.
    """
    turns = {deployment_name_of(id_): len(group) for group in light_groups for id_ in group}
    sections = {str(section.get("name")): section for section in deployments}
    own = [(INGRESS_NAME, INGRESS_NUM_CPUS, 0.0, False)]
    if has_ledger:
        own.append((LEDGER_NAME, DESCRIBING_NUM_CPUS, 0.0, False))
    models = [
        (
            model.deployment_name,
            number(model.num_cpus),
            shares.get(model.id, 0.0),
            model.engine_args.uses_ray,
        )
        for model in config.models
    ]
    found = []
    for name, num_cpus, num_gpus, is_spread in (*own, *models):
        section = sections.get(name, {})
        options = section.get("ray_actor_options")
        if options is not None:  # in place of both, as Ray reads it
            given = options.get("num_cpus")
            num_cpus = 1.0 if given is None else given
            num_gpus = num_gpus if is_spread else options.get("num_gpus") or 0.0
        least = 1 if name in turns else 0
        num_replicas = max(least, _num_replicas(section, most))
        num_turns = turns.get(name, 1)
        if options is None:
            num_gpus = part_of_turn(num_gpus, num_turns)
        found.append(Demand(name, num_replicas, num_cpus, num_gpus, num_turns, is_spread))
    return found


def stated_demands(
    deployments: Iterable[Mapping[str, Any]], unstated_num_cpus: float | None = None
) -> list[Demand]:
    """Return what the replicas of an application reserve that is not raystream's.

    Args:
        deployments: Its `deployments:`, each with the keys that the file gives.
        unstated_num_cpus: Cores of each replica of a deployment whose numbers only its code has;
            None leaves it out.
    """
    found = []
    for section in deployments:
        options = section.get("ray_actor_options")
        num_cpus = unstated_num_cpus
        if options is not None:
            given = options.get("num_cpus")
            num_cpus = 1.0 if given is None else given
        if num_cpus is not None:
            num_gpus = (options or {}).get("num_gpus") or 0.0
            number = _num_replicas(section, None)
            found.append(Demand(str(section.get("name")), number, num_cpus, num_gpus))
    return found


def _num_replicas(section: Mapping[str, Any], most: int | None) -> int:
    """Return how many replicas a deployment starts with, or grows to."""
    number = section.get("num_replicas")
    scaling = section.get("autoscaling_config") or {}
    if number is not None and number != "auto":
        return int(number)
    default = (1, 100) if number == "auto" else (1, 1)  # Ray's own
    least = scaling.get("min_replicas", default[0])
    first = scaling.get("initial_replicas") or least
    if most is None:
        return int(first)
    return max(int(first), min(most, int(scaling.get("max_replicas") or default[1])))
