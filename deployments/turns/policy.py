"""The autoscaling policy of an application whose models take turns.

Serve's controller asks `TurnPolicy` in each of its loops how many replicas each deployment shall
have. Of a group of models those have turns that fit on the device together (`planner`): the own
policy of each says how many replicas it gets, and the others get none. A model whose turn is over
is scaled to zero. The ingresses see that Serve wants no replica of it, and park its streams
(`serve_app.backends.replicas.replica_departures`). Until its next turn these are offered to Serve,
as new requests are. So both count as requests that wait, and nothing else has to tell the policy.

The models of a light group keep their replicas, which sleep lightly while another model has the
turn, as `holders` says to them. The state is lost with the controller: the next one goes on with
the models that run, or with the one that the store names.
"""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from deployments.turns.holders import PublishedHolder, read_holder, write_holder
from deployments.turns.planner import MAX_START_S, ModelState, Turns

Group = Sequence[str] | Mapping[str, float]
"""The ids of models, each with the part of the device that it takes; without parts, all of it."""

WITHOUT_DELAY: Final = {"downscale_delay_s": 0.0, "downscale_to_zero_delay_s": 0.0}
"""Serve's delays are for a load that may come back. The end of a turn does not depend on a load.

`deployments.autoscaling` has the same for an operator's wish, and imports Ray, which a plan of the
turns does without.
"""

RECOVERY_S: Final = 20.0
"""In which a new controller finds the replicas that run. Then one that does not run has ended."""

LASTING: Final = 0.5
"""Requests, by Serve's mean, from which some wait at a model that sleeps lightly. Questions to its
replica, such as those of a list of models, are requests, too, and last for milliseconds.
"""


class Context(Protocol):
    """The part of Serve's `AutoscalingContext` that the policy reads, and writes for one loop.

    Attributes:
        app_name: The application.
        deployment_name: The deployment.
        current_num_replicas: Replicas that run.
        target_num_replicas: Replicas that should run by the last decision.
        total_num_requests: Requests that run or wait, the mean over `look_back_period_s`.
        raw_metrics: By name of a figure, the values that each running replica has reported, the
            latest one last.
        config: The deployment's `autoscaling_config`.
    """

    app_name: str
    deployment_name: str
    current_num_replicas: int
    target_num_replicas: int
    total_num_requests: float
    raw_metrics: Mapping[str, Mapping[Any, Sequence[Any]]] | None
    config: Any


def _latest(context: Context, name: str) -> list[float]:
    """Return a figure as each of the running replicas has reported it last, if it has."""
    reported = (context.raw_metrics or {}).get(name, {}).values()
    return [float(series[-1].value) for series in reported if series]


def _has_waiting(context: Context) -> bool:
    """Return whether requests wait for a model that has no turn."""
    if not context.current_num_replicas:
        return context.total_num_requests > 0
    in_replicas = _latest(context, "running") + _latest(context, "waiting")
    return any(in_replicas) or context.total_num_requests >= LASTING


@dataclass(frozen=True, slots=True)
class _Wish:
    """What a deployment's own policy wants."""

    num_replicas: float
    state: dict[str, Any]


class TurnPolicy:
    """Scales an application whose models take turns.

    The parameters are `policy_kwargs` of the application's `autoscaling_policy` in the
    configuration file. Deployments outside all groups are scaled by their own policies.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        min_turn_s: float | None = None,
        max_start_s: float = MAX_START_S,
        light: Sequence[str] = (),
        *,
        now_s: Callable[[], float] = time.monotonic,
        read: Callable[[str, str], str | None] = read_holder,
        write: Callable[[str, str, str], None] = write_holder,
    ) -> None:
        """Start without turns.

        Args:
            groups: The models of each group, by the group's name. Those whose parts fit on the
                device together have turns at the same time; without parts one has.
            min_turn_s: See `Turns`.
            max_start_s: See `Turns`.
            light: The names of groups whose models keep their replicas, and sleep lightly while
                another one has the turn: each takes the whole device.
            now_s: Returns the time of a monotonic clock, in seconds.
            read: See `read_holder`.
            write: See `write_holder`.
        """
        parts = {group: parts_of(models) for group, models in groups.items()}
        self._turns = {
            group: Turns(found, min_turn_s, max_start_s) for group, found in parts.items()
        }
        self._group_of = {name: group for group, found in parts.items() for name in found}
        self._published = {
            group: PublishedHolder(group, now_s, read, write) for group in parts if group in light
        }
        self._now_s = now_s
        self._began_s = now_s()
        self._policies: dict[Any, tuple[Any, Callable[[Any], Any]]] = {}

    def __call__(
        self, contexts: Mapping[Any, Context]
    ) -> tuple[dict[Any, float], dict[Any, dict[str, Any]]]:
        """Return the number of replicas of each deployment, and the states of their own policies.

        A deployment without a number keeps what it has. So a model waits for its turn although
        requests wait, for which Serve would start a replica at once.

        Args:
            contexts: What Serve knows of each deployment, by Serve's id of it.
        """
        wishes = {key: self._wish_of(key, context) for key, context in contexts.items()}
        holders = self._holders(contexts, wishes)
        numbers = {}
        for key, context in contexts.items():
            group = self._group_of.get(context.deployment_name)
            if group is None or context.deployment_name in holders.get(group, ()):
                numbers[key] = wishes[key].num_replicas
            elif context.target_num_replicas and group in holders:
                number = self._without_turn(group, context, wishes[key])
                if number is not None:
                    numbers[key] = number
        return numbers, {key: wish.state for key, wish in wishes.items()}

    def _without_turn(self, group: str, context: Context, wish: _Wish) -> float | None:
        """Return the replicas of a model that has no turn; None if it keeps what it has."""
        if group in self._published:
            if context.current_num_replicas:  # which sleeps lightly, or is about to
                most = context.target_num_replicas
                return most if _has_waiting(context) else min(most, wish.num_replicas)
            if self._now_s() < self._began_s + RECOVERY_S:
                return None
        # Serve applies these delays to what is returned, and keeps what it starts while requests
        # wait. It makes the context anew in each loop.
        context.config = context.config.model_copy(update=WITHOUT_DELAY)
        context.total_num_requests = 0.0
        return 0

    def _wish_of(self, key: Any, context: Context) -> _Wish:
        policy = context.config.policy
        if self._policies.get(key, (None,))[0] is not policy:  # a new file was deployed
            found: Any = policy.get_policy()
            call: Any = found(**policy.policy_kwargs) if inspect.isclass(found) else found
            self._policies[key] = policy, call
        num_replicas, state = self._policies[key][1](context)
        return _Wish(num_replicas, dict(state or {}))

    def _holders(
        self, contexts: Mapping[Any, Context], wishes: Mapping[Any, _Wish]
    ) -> dict[str, tuple[str, ...]]:
        """Return the models that have a turn in each group, by the group's name.

        A light group is missing while the store does not say who had its turn before.
        """
        if not contexts:
            return {}
        application = next(iter(contexts.values())).app_name
        # Before anything is said of a model: that depends on whether it has the turn.
        silent = {
            group
            for group, published in self._published.items()
            if not published.find(application, self._turns[group])
        }
        states: dict[str, dict[str, ModelState]] = {}
        for key, context in contexts.items():
            group = self._group_of.get(context.deployment_name)
            if group is not None:
                state = self._state_of(group, context, wishes[key])
                states.setdefault(group, {})[context.deployment_name] = state
        now_s = self._now_s()
        holders = {}
        for group, turns in self._turns.items():
            if group in silent:
                continue
            holders[group] = turns.update(now_s, _NothingKnown(states.get(group, {})))
            if group in self._published:
                self._published[group].publish(application, holders[group][0])
        return holders

    def _state_of(self, group: str, context: Context, wish: _Wish) -> ModelState:
        is_there = context.current_num_replicas > 0
        is_pinned = wish.state.get("is_pinned", False)  # of `LoadPolicy`
        is_kept = wish.state.get("is_kept", False)  # only to sleep lightly; of the same
        is_running, says_policy = is_there, is_there
        if group in self._published:
            awake = _latest(context, "awake")
            is_asleep = bool(awake) and not any(awake)
            is_running = is_there and any(awake)
            has_turn = context.deployment_name in self._turns[group].holders
            says_policy = is_there and has_turn and not is_asleep
        # Of a model that can't work now only requests say so: a policy may want a replica to start
        # with, and one because of requests that were answered a moment ago. A sleeper answers those
        # that need no weights, also in its turn.
        asked = is_pinned or _has_waiting(context)
        return ModelState(
            is_running,
            context.target_num_replicas > 0,
            wish.num_replicas > 0 and not is_kept if says_policy else asked,
            is_pinned,
        )


def parts_of(models: Group) -> dict[str, float]:
    """Return the part of the device that each deployment of a group takes."""
    parts = models if isinstance(models, Mapping) else dict.fromkeys(models, 1.0)
    # As `deployment_name_of` says, of a module that the controller can't import.
    return {id_.replace("/", "--"): part for id_, part in parts.items()}


class _NothingKnown(dict[str, ModelState]):
    """States by model; one that Serve does not scale yet, as while a file is deployed, is idle."""

    def __missing__(self, name: str) -> ModelState:
        return ModelState(is_running=False, is_wanted=False, has_work=False)
