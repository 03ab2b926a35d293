"""Turns: models that share a device and don't fit on it together run one after the other.

`TurnPolicy` is the autoscaling policy of a whole application. Serve's controller asks it in each of
its loops how many replicas each deployment shall have. Of a group of models only one has the turn:
its own policy says how many replicas it gets, and the others get none. A model whose turn is over
is scaled to zero. The ingresses see that Serve wants no replica of it, and park its streams
(`serve_app.backends.replicas.replica_departures`). Until its next turn these are offered to Serve,
as new requests are. So both count as requests that wait, and nothing else has to tell the policy.

The models of a light group keep their replicas, which sleep lightly while another model has the
turn. Who has it stands in the key-value store of Ray's control service, where the replicas read it.

Serve copies this module by value into its controller, so it imports nothing of ours and nothing
heavy. The state is lost with the controller: the next one goes on with the model that runs, or that
the store names.
"""

import inspect
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

logger = logging.getLogger("ray.serve")

MIN_TURN_S: Final = 30.0
"""A swap on a CPU takes about 10 s, so that at least three quarters of the time are worked."""

MAX_START_S: Final = 600.0
"""Weights may have to be downloaded first."""

WITHOUT_DELAY: Final = {"downscale_delay_s": 0.0, "downscale_to_zero_delay_s": 0.0}
"""Serve's delays are for a load that may come back. The end of a turn does not depend on a load.

`deployments.autoscaling` has the same for an operator's wish, and imports Ray, which a plan of the
turns does without.
"""


HOLDERS: Final = b"raystream-turns"
"""Namespace of the holders, in the key-value store of Ray's control service."""

RETRY_INTERVAL_S: Final = 10.0
"""When a store that was silent is asked again, since Serve's controller waits for it meanwhile."""

RECOVERY_S: Final = 20.0
"""In which a new controller finds the replicas that run. Then one that does not run has ended."""

LASTING: Final = 0.5
"""Requests, by Serve's mean, from which some wait at a model that sleeps lightly. Questions to its
replica, such as those of a list of models, are requests, too, and last for milliseconds.
"""

STORE_TIMEOUT_S: Final = 1.0
"""How long Ray's control service may take for a question; its client may wait as long again."""


def read_holder(application: str, group: str) -> str | None:
    """Return the deployment that has the turn of a light group; None if none has had one yet.

    Raises:
        Exception: Ray's control service does not answer within `STORE_TIMEOUT_S`.
    """
    client = _store()
    if client is None:  # no Ray
        return None
    key = _holder_key(application, group)
    stored = client.internal_kv_multi_get([key], HOLDERS, timeout=STORE_TIMEOUT_S)
    return str(json.loads(stored[key])["holder"]) if key in stored else None


def write_holder(application: str, group: str, deployment: str) -> None:
    """Say which deployment of a light group has the turn.

    Raises:
        Exception: Ray's control service does not answer within `STORE_TIMEOUT_S`.
    """
    client = _store()
    if client is not None:
        value = json.dumps({"holder": deployment}).encode()
        key = _holder_key(application, group)
        client.internal_kv_put(key, value, True, HOLDERS, timeout=STORE_TIMEOUT_S)


def _holder_key(application: str, group: str) -> bytes:
    return f"{application}#{group}".encode()


def _store() -> Any:
    """Return a client of Ray's control service; None without Ray."""
    # Here, since a plan of the turns does without Ray.
    from ray.experimental.internal_kv import internal_kv_get_gcs_client

    return internal_kv_get_gcs_client()  # type: ignore[no-untyped-call] # Ray leaves it untyped


@dataclass(frozen=True, slots=True)
class ModelState:
    """What the controller knows of one model of a group.

    Attributes:
        is_running: Whether a replica runs; of a light group, one that is awake.
        is_wanted: Whether one shall run, by the last decision.
        has_work: Whether anything runs or waits, or did a few seconds ago; or it is pinned.
        is_pinned: Whether an operator wants it to keep its turn.
    """

    is_running: bool
    is_wanted: bool
    has_work: bool
    is_pinned: bool = False


class Turns:
    """Says which model of one group has the turn.

    A turn ends only if another model waits. Of several, the one that has waited longest is next. A
    turn lasts at least `min_turn_s` from when a replica runs, or until the model has no more work.
    A model whose replica is missing in its turn keeps it until that runs again: streams that lost
    theirs wait for it only for a limited time. After `max_start_s` without one the turn ends, too.

    A model that an operator has pinned counts as one with work, and keeps its turn while it runs.

    Attributes:
        models: The models of the group; at the start the first goes first.
        holder: The one that has the turn; None at the start.
    """

    def __init__(self, models: Sequence[str], min_turn_s: float, max_start_s: float) -> None:
        """Start without a turn.

        Args:
            models: See above.
            min_turn_s: The least length of a turn while others wait, in seconds.
            max_start_s: The most seconds that a turn goes on without a running replica.
        """
        self.models = models
        self._min_turn_s = min_turn_s
        self._max_start_s = max_start_s
        self.holder: str | None = None
        self._began_s: float | None = None  # when the holder first ran in its turn
        self._missing_since_s: float | None = None  # when its replica was last seen to be missing
        self._waiting_since_s: dict[str, float] = {}

    def update(self, now_s: float, states: Mapping[str, ModelState]) -> str:
        """Return the model that has the turn from now on.

        Args:
            now_s: The time of a monotonic clock, in seconds.
            states: The state of each model of the group.
        """
        if self.holder is None:
            self.begin(max(self.models, key=lambda each: _claim(states[each])))
        assert self.holder is not None, "a turn has begun"
        for name in self.models:
            if name != self.holder and states[name].has_work:
                self._waiting_since_s.setdefault(name, now_s)
            else:
                self._waiting_since_s.pop(name, None)
        if self._is_over(now_s, states[self.holder]) and self._waiting_since_s:
            self.begin(min(self._waiting_since_s, key=self._waiting_since_s.__getitem__))
        return self.holder

    def begin(self, name: str) -> None:
        """Give a model the turn."""
        self.holder = name
        self._began_s = self._missing_since_s = None
        self._waiting_since_s.pop(name, None)

    def _is_over(self, now_s: float, holder: ModelState) -> bool:
        """Return whether the turn ends if another model waits; note since when it has lasted."""
        if holder.is_running:
            self._missing_since_s = None
            if self._began_s is None:
                self._began_s = now_s
            if holder.is_pinned:
                return False
            return not holder.has_work or now_s - self._began_s >= self._min_turn_s
        if not holder.has_work:
            self._began_s = self._missing_since_s = None
            return True
        if self._missing_since_s is None:
            self._missing_since_s = now_s
        return now_s - self._missing_since_s >= self._max_start_s


def _claim(state: ModelState) -> tuple[bool, bool, bool, bool]:
    """Return how good a model's claim to the first turn is."""
    return state.is_running, state.is_pinned, state.has_work, state.is_wanted


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


class _Published:
    """Who has the turn of a light group, as its replicas read it.

    While the store is silent they go on with the one that they know.
    """

    def __init__(
        self,
        group: str,
        now_s: Callable[[], float],
        read: Callable[[str, str], str | None],
        write: Callable[[str, str, str], None],
    ) -> None:
        self._group = group
        self._now_s = now_s
        self._read = read
        self._write = write
        self._holder: str | None = None
        self._is_read = False
        self._next_s = now_s()

    def find(self, application: str, turns: Turns) -> bool:
        """Give the turn to the model that had it under an earlier controller.

        Returns:
            Whether that was found out by now.
        """
        if not self._is_read:
            self._is_read = self._ask(lambda: self._note(self._read(application, self._group)))
            if self._holder is not None and self._holder in turns.models:
                turns.begin(self._holder)
        return self._is_read

    def publish(self, application: str, holder: str) -> None:
        """Say who has the turn, unless that is known."""
        if holder != self._holder and self._ask(
            lambda: self._write(application, self._group, holder)
        ):
            self._note(holder)

    def _note(self, holder: str | None) -> None:
        self._holder = holder

    def _ask(self, question: Callable[[], None]) -> bool:
        """Ask the store, unless it was silent a moment ago; return whether it has answered."""
        if self._now_s() < self._next_s:
            return False
        try:
            question()
        except Exception as error:  # noqa: BLE001 - any of Ray's; scaling goes on
            logger.warning("turns of %s: Ray's store does not answer: %r", self._group, error)
            self._next_s = self._now_s() + RETRY_INTERVAL_S
            return False
        return True


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
        groups: Mapping[str, Sequence[str]],
        min_turn_s: float = MIN_TURN_S,
        max_start_s: float = MAX_START_S,
        light: Sequence[str] = (),
        *,
        now_s: Callable[[], float] = time.monotonic,
        read: Callable[[str, str], str | None] = read_holder,
        write: Callable[[str, str, str], None] = write_holder,
    ) -> None:
        """Start without turns.

        Args:
            groups: The ids of the models of each group, by the group's name.
            min_turn_s: See `Turns`.
            max_start_s: See `Turns`.
            light: The names of groups whose models keep their replicas, and sleep lightly while
                another one has the turn.
            now_s: Returns the time of a monotonic clock, in seconds.
            read: See `read_holder`.
            write: See `write_holder`.
        """
        # As `deployment_name_of` says, of a module that the controller can't import.
        deployments = {
            group: [each.replace("/", "--") for each in models] for group, models in groups.items()
        }
        self._turns = {
            group: Turns(names, min_turn_s, max_start_s) for group, names in deployments.items()
        }
        self._group_of = {name: group for group, names in deployments.items() for name in names}
        self._published = {
            group: _Published(group, now_s, read, write) for group in deployments if group in light
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
            if group is None or context.deployment_name == holders.get(group):
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
    ) -> dict[str, str]:
        """Return the model that has the turn in each group, by the group's name.

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
                self._published[group].publish(application, holders[group])
        return holders

    def _state_of(self, group: str, context: Context, wish: _Wish) -> ModelState:
        is_there = context.current_num_replicas > 0
        is_pinned = wish.state.get("is_pinned", False)  # of `LoadPolicy`
        is_running, says_policy = is_there, is_there
        if group in self._published:
            awake = _latest(context, "awake")
            is_asleep = bool(awake) and not any(awake)
            is_running = is_there and any(awake)
            has_turn = self._turns[group].holder == context.deployment_name
            says_policy = is_there and has_turn and not is_asleep
        # Of a model that can't work now only requests say so: a policy may want a replica to start
        # with, and one because of requests that were answered a moment ago. A sleeper answers those
        # that need no weights, also in its turn.
        asked = is_pinned or _has_waiting(context)
        return ModelState(
            is_running,
            context.target_num_replicas > 0,
            wish.num_replicas > 0 if says_policy else asked,
            is_pinned,
        )


class _NothingKnown(dict[str, ModelState]):
    """States by model; one that Serve does not scale yet, as while a file is deployed, is idle."""

    def __missing__(self, name: str) -> ModelState:
        return ModelState(is_running=False, is_wanted=False, has_work=False)
