"""Autoscaling: how many replicas the load of a model needs.

Each replica reports its load to Serve's controller (`ModelReplica.record_autoscaling_stats`), and
the controller asks `LoadPolicy` for the number of replicas in each of its loops. Serve's own policy
counts requests, which says little here: a request may be a sentence or fill the memory, and one
that was refused never becomes an ongoing request.

Serve copies this module by value into its controller, so it imports nothing heavy, and nothing of
ours. The limits and delays of `autoscaling_config` apply to what the policy returns:
`min_replicas`, `max_replicas`, `upscale_delay_s`, `downscale_delay_s` and
`downscale_to_zero_delay_s`.

An operator may pin a model or put it to sleep. Such a wish stands in the key-value store of Ray's
control service: the ingress writes it, and the policy reads it once a second. So it outlives
replicas, ingresses, the controller and a deploy, and lasts as long as the cluster.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from math import ceil
from typing import Any, Final, Protocol, Self

from ray.experimental.internal_kv import internal_kv_get_gcs_client

logger = logging.getLogger("ray.serve")

NAMESPACE: Final = b"raystream-wishes"
"""Of the wishes, in the key-value store of Ray's control service."""

READ_INTERVAL_S: Final = 1.0
READ_TIMEOUT_S: Final = 1.0
"""Serve's controller waits meanwhile, as it does for its own questions to the control service."""

RETRY_INTERVAL_S: Final = 10.0
"""When a store that was silent is asked again: each model's policy asks by itself, and with ten
models Serve's controller would do nothing but wait."""

WITHOUT_DELAY: Final = {"downscale_delay_s": 0.0, "downscale_to_zero_delay_s": 0.0}
"""Serve's delays are for a load that may come back, not for an operator who wants an end."""


@dataclass(frozen=True, slots=True)
class OperatorWish:
    """What an operator wants of a model.

    Attributes:
        is_pinned: It shall run, whether or not it is used.
        ending: Ids of replicas that shall end as soon as none of them has anything to do. Replicas
            that start later are not meant, so the wish needs no end: the next request wakes the
            model.
    """

    is_pinned: bool = False
    ending: frozenset[str] = frozenset()


NO_WISH: Final = OperatorWish()

ReadWish = Callable[[str, str], OperatorWish]
"""Returns the wish for an application's deployment."""


@dataclass(frozen=True, slots=True)
class WishKeys:
    """Where the store has the wish for a deployment.

    The store can't change a value only if it is still what was read. So a pin and an end are apart:
    whoever writes one of them undoes no other operator's change of the other.

    Attributes:
        pin: There while the model is pinned.
        ending: The ids of replicas that shall end; see `ending_to_json`.
    """

    pin: bytes
    ending: bytes

    @classmethod
    def of(cls, application: str, deployment: str) -> Self:
        """Return the keys of an application's deployment."""
        return cls(*(f"{application}#{deployment}#{name}".encode() for name in ("pin", "ending")))

    def read(self, stored: Mapping[bytes, bytes]) -> OperatorWish:
        """Return the wish, from the store's values by their keys."""
        return OperatorWish(
            self.pin in stored, frozenset(json.loads(stored.get(self.ending, b"[]")))
        )


def ending_to_json(ending: Iterable[str]) -> bytes:
    """Return ids of replicas that shall end as the store keeps them."""
    return json.dumps(sorted(ending)).encode()


def read_wish(application: str, deployment: str) -> OperatorWish:
    """Return what an operator wants of a deployment; see `read_wishes`."""
    return read_wishes(application, (deployment,))[deployment]


def read_wishes(application: str, deployments: Iterable[str]) -> dict[str, OperatorWish]:
    """Return what an operator wants of each deployment, by its name.

    It is one question, so a control service that is silent is waited for once.

    Raises:
        Exception: Ray's control service does not answer within `READ_TIMEOUT_S`.
    """
    keys = {each: WishKeys.of(application, each) for each in deployments}
    client = internal_kv_get_gcs_client()  # type: ignore[no-untyped-call] # Ray leaves it untyped
    if client is None:  # no Ray
        return dict.fromkeys(keys, NO_WISH)
    asked = [key for each in keys.values() for key in (each.pin, each.ending)]
    stored = client.internal_kv_multi_get(asked, NAMESPACE, timeout=READ_TIMEOUT_S)
    return {each: found.read(stored) for each, found in keys.items()}


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of one replica.

    Attributes:
        running: What runs, as a part of the most that can run at once.
        waiting: What waits, as a part of the same.
        refused: What was refused lately, as a part of the same; at most 1, since clients ask again.
        recent: 1 if the replica was used in the last seconds, else 0.
        kv_usage: The part of the KV memory that running sequences hold.
        waiting_tokens: Tokens of what waits: prompts, and the tokens that may be generated.
        awake: 1 if the model is in memory, 0 while it sleeps lightly or wakes.
        kept: 1 if the process is to stay without load, since it sleeps lightly or soon will.
        ending: 1 if the process is to end without Serve's delay: it has slept lightly for long
            enough, or the machine's memory is short.
    """

    running: float
    waiting: float = 0.0
    refused: float = 0.0
    recent: float = 0.0
    kv_usage: float = 0.0
    waiting_tokens: float = 0.0
    awake: float = 1.0
    kept: float = 0.0
    ending: float = 0.0

    @property
    def wanted(self) -> float:
        """The replicas, or the part of one, that all that came would fill at once."""
        return self.running + self.waiting + self.refused

    @property
    def busy(self) -> float:
        """The part of the replica that is in use."""
        return max(self.running, self.kv_usage)

    def as_stats(self) -> dict[str, float]:
        """Return the load by name, as Serve takes it."""
        return asdict(self)


class Context(Protocol):
    """The part of Serve's `AutoscalingContext` that the policy reads.

    Attributes:
        app_name: The application.
        deployment_name: The deployment.
        running_replicas: Serve's ids of the replicas that run.
        current_num_replicas: Replicas that run.
        target_num_replicas: Replicas that should run by the last decision.
        total_queued_requests: Requests that no replica has got yet, the mean over
            `look_back_period_s`.
        aggregated_metrics: By name of a figure, the mean of each replica over `look_back_period_s`.
        raw_metrics: The same, the values that each has reported, the latest one last.
        config: The deployment's `autoscaling_config`; written for one loop.
    """

    app_name: str
    deployment_name: str
    running_replicas: Sequence[Any]
    current_num_replicas: int
    target_num_replicas: int
    total_queued_requests: float
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None
    raw_metrics: Mapping[str, Mapping[Any, Sequence[Any]]] | None
    config: Any


class LatestWish:
    """The wish for one deployment, as it was read a second ago, or before the store fell silent."""

    def __init__(self, read: ReadWish, now_s: Callable[[], float] = time.monotonic) -> None:
        """Start without a wish.

        Args:
            read: Reads it.
            now_s: Returns the time of a monotonic clock, in seconds.
        """
        self._read = read
        self._now_s = now_s
        self._next_read_s: float | None = None
        self._wish = NO_WISH
        self._since_s = 0.0

    def of(self, ctx: Context) -> OperatorWish:
        """Return the wish; the last one that was read while the store does not answer."""
        if self._next_read_s is None or self._now_s() >= self._next_read_s:
            wish, interval_s = self._wish, READ_INTERVAL_S
            try:
                wish = self._read(ctx.app_name, ctx.deployment_name)
            except Exception as error:  # noqa: BLE001 - any of Ray's; scaling goes on
                logger.warning("%s: no wish can be read: %r", ctx.deployment_name, error)
                interval_s = RETRY_INTERVAL_S
            read_s = self._now_s()
            self._next_read_s = read_s + interval_s
            if wish != self._wish:
                self._wish, self._since_s = wish, read_s
        return self._wish

    @property
    def age_s(self) -> float:
        """How long the wish has been known, in seconds."""
        return self._now_s() - self._since_s


@dataclass(frozen=True, slots=True)
class Demand:
    """The load of all replicas together.

    Attributes:
        wanted: Replicas that all that came would fill at once.
        busy: Replicas' worth of what is in use.
        waiting_tokens: Tokens of what waits.
        is_any: Whether anybody uses the model.
    """

    wanted: float
    busy: float
    waiting_tokens: float
    is_any: bool

    @classmethod
    def of(cls, metrics: Mapping[str, Mapping[Any, float]] | None) -> Self:
        """Add up the reports; a replica that has not reported yet has no load."""
        by_name = metrics or {}
        names = [field.name for field in fields(ReplicaLoad)]
        replicas = {replica for name in names for replica in by_name.get(name, ())}
        loads = [
            ReplicaLoad(**{name: by_name.get(name, {}).get(replica, 0.0) for name in names})
            for replica in replicas
        ]
        return cls(
            sum(load.wanted for load in loads),
            sum(load.busy for load in loads),
            sum(load.waiting_tokens for load in loads),
            any(load.recent or load.wanted for load in loads),
        )

    def times(self, factor: float) -> Self:
        """Return a multiple of the load."""
        return replace(
            self,
            wanted=self.wanted * factor,
            busy=self.busy * factor,
            waiting_tokens=self.waiting_tokens * factor,
        )


PINNED: Final[Mapping[str, bool]] = {"is_pinned": True}
"""The state of a pinned model's policy, by which `deployments.turns` knows."""

KEPT: Final[Mapping[str, bool]] = {"is_kept": True}
"""The same of a model that has no load, and replicas only so that they sleep lightly."""


def _num_latest(ctx: Context, name: str) -> int:
    """Return of how many running replicas the latest report has 1 for a figure."""
    reported = (ctx.raw_metrics or {}).get(name, {}).values()
    return sum(1 for series in reported if series and series[-1].value)


def _is_to_end(ctx: Context, ending: frozenset[str]) -> bool:
    """Return whether an operator wants some of the running replicas to end, and no request waits.

    That the model was used a moment ago does not count.
    """
    if not any(each.unique_id in ending for each in ctx.running_replicas):
        return False
    return Demand.of(ctx.aggregated_metrics).wanted == 0 and ctx.total_queued_requests == 0


@dataclass(frozen=True)
class LoadPolicy:
    """Returns the number of replicas that a model's load needs.

    Replicas are added until all that runs, waits and was refused would fill `target_busy` of each,
    and further ones for tokens that wait: few sequences may be long. A replica leaves only when the
    others stay below `busy_to_leave` without it, and never while requests wait for the way to a
    replica: those are in no report. Between the two thresholds nothing changes, so that a load at
    one of them does not make replicas come and go.

    Without load the last replica stays as long as it says so, since it sleeps lightly or will, and
    then ends without Serve's delay: it has waited long enough (`deployments.replica.deep_sleep`).

    An operator's wish goes before the load: a pinned model keeps a replica, and one that was put to
    sleep ends without Serve's delays once nothing runs or waits.

    The fields are `policy_kwargs` in the configuration file, but for the last one; `raystream
    check` describes them.

    Attributes:
        wish: What an operator wants of the model.
    """

    target_busy: float = 0.8
    busy_to_leave: float = 0.6
    target_waiting_tokens: float = 4096
    wish: LatestWish = field(default_factory=lambda: LatestWish(read_wish), compare=False)

    def __post_init__(self) -> None:
        """Check the thresholds.

        Raises:
            ValueError: They are not positive, or `busy_to_leave` is not below `target_busy`.
        """
        if not 0 < self.busy_to_leave < self.target_busy or self.target_waiting_tokens <= 0:
            raise ValueError(
                "policy_kwargs need 0 < busy_to_leave < target_busy and target_waiting_tokens > 0, "
                f"not {self.busy_to_leave:g}, {self.target_busy:g} and "
                f"{self.target_waiting_tokens:g}"
            )

    def __call__(self, ctx: Context) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, and the state: `PINNED`, `KEPT` or none."""
        wish = self.wish.of(ctx)
        if wish.is_pinned:
            return max(self._by_load(ctx), 1), dict(PINNED)
        # Requests that began shortly before the wish are in the reports by then.
        is_due = self.wish.age_s >= ctx.config.look_back_period_s
        if is_due and _is_to_end(ctx, wish.ending):
            # Serve applies these delays to what is returned, and makes the context anew in each
            # loop.
            ctx.config = ctx.config.model_copy(update=WITHOUT_DELAY)
            return 0, {}
        number = self._by_load(ctx)
        return (number, {}) if number else self._without_load(ctx)

    def _without_load(self, ctx: Context) -> tuple[int, dict[str, Any]]:
        """Return the replicas of a model that nobody uses, and the state `KEPT` if any stays."""
        num_kept, num_ending = _num_latest(ctx, "kept"), _num_latest(ctx, "ending")
        if num_ending:
            ctx.config = ctx.config.model_copy(update=WITHOUT_DELAY)
            return min(num_kept, ctx.target_num_replicas), dict(KEPT) if num_kept else {}
        return (1, dict(KEPT)) if num_kept else (0, {})

    def _by_load(self, ctx: Context) -> int:
        """Return the number of replicas that the load needs."""
        demand = Demand.of(ctx.aggregated_metrics)
        target = ctx.target_num_replicas
        is_any_on_the_way = ctx.total_queued_requests >= 1
        if not demand.is_any and not is_any_on_the_way:
            # A replica that has just started may not have reported yet. Serve counts requests, too,
            # but a probe is one of them.
            is_young = ctx.current_num_replicas > 0 and not ctx.aggregated_metrics
            return target if is_young else 0
        num_replicas = self._num_for(demand, self.target_busy)
        if num_replicas <= target and is_any_on_the_way:
            num_replicas = target
        elif num_replicas <= target:
            # While replicas are missing, the load of one may be in no report: it has just died.
            # Several are more likely to start, or can't be placed.
            if 0 < ctx.current_num_replicas < target:
                demand = demand.times(1 + 1 / ctx.current_num_replicas)
            num_replicas = min(target, self._num_for(demand, self.busy_to_leave))
        return max(num_replicas, 1)

    def _num_for(self, demand: Demand, busy: float) -> int:
        """Return how many replicas have this load if each of them is as busy."""
        by_tokens = demand.busy / busy + demand.waiting_tokens / self.target_waiting_tokens
        return ceil(max(demand.wanted / busy, by_tokens) - 1e-9)  # 2.4 / 0.8 may exceed 3
