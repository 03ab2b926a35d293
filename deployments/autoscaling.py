"""Autoscaling: how many replicas the load of a model needs.

Each replica reports its load to Serve's controller (`ModelReplica.record_autoscaling_stats`), and
the controller asks `LoadPolicy` for the number of replicas in each of its loops. Serve's own policy
counts requests, which says little here: a request may be a sentence or fill the memory, and one
that was refused never becomes an ongoing request.

Serve copies this module by value into its controller, so it imports nothing heavy. The limits and
delays of `autoscaling_config` apply to what the policy returns: `min_replicas`, `max_replicas`,
`upscale_delay_s`, `downscale_delay_s` and `downscale_to_zero_delay_s`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from typing import Any, Protocol, Self


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
    """

    running: float
    waiting: float = 0.0
    refused: float = 0.0
    recent: float = 0.0
    kv_usage: float = 0.0
    waiting_tokens: float = 0.0

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
        current_num_replicas: Replicas that run.
        target_num_replicas: Replicas that should run by the last decision.
        total_queued_requests: Requests that no replica has got yet, the mean over
            `look_back_period_s`.
        aggregated_metrics: By name of a figure, the mean of each replica over `look_back_period_s`.
    """

    current_num_replicas: int
    target_num_replicas: int
    total_queued_requests: float
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None


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


@dataclass(frozen=True)
class LoadPolicy:
    """Returns the number of replicas that a model's load needs.

    Replicas are added until all that runs, waits and was refused would fill `target_busy` of each,
    and further ones for tokens that wait: few sequences may be long. A replica leaves only when the
    others stay below `busy_to_leave` without it, and never while requests wait for the way to a
    replica: those are in no report. Between the two thresholds nothing changes, so that a load at
    one of them does not make replicas come and go.

    The fields are `policy_kwargs` in the configuration file; `raystream check` describes them.
    """

    target_busy: float = 0.8
    busy_to_leave: float = 0.6
    target_waiting_tokens: float = 4096

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
        """Return the number of replicas, and no state: Serve keeps that of the delays."""
        demand = Demand.of(ctx.aggregated_metrics)
        target = ctx.target_num_replicas
        is_any_on_the_way = ctx.total_queued_requests >= 1
        if not demand.is_any and not is_any_on_the_way:
            # A replica that has just started may not have reported yet. Serve counts requests, too,
            # but a probe is one of them.
            is_young = ctx.current_num_replicas > 0 and not ctx.aggregated_metrics
            return target if is_young else 0, {}
        num_replicas = self._num_for(demand, self.target_busy)
        if num_replicas <= target and is_any_on_the_way:
            num_replicas = target
        elif num_replicas <= target:
            # While replicas are missing, the load of one may be in no report: it has just died.
            # Several are more likely to start, or can't be placed.
            if 0 < ctx.current_num_replicas < target:
                demand = demand.times(1 + 1 / ctx.current_num_replicas)
            num_replicas = min(target, self._num_for(demand, self.busy_to_leave))
        return max(num_replicas, 1), {}

    def _num_for(self, demand: Demand, busy: float) -> int:
        """Return how many replicas have this load if each of them is as busy."""
        by_tokens = demand.busy / busy + demand.waiting_tokens / self.target_waiting_tokens
        return ceil(max(demand.wanted / busy, by_tokens) - 1e-9)  # 2.4 / 0.8 may exceed 3
