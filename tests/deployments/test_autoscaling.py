"""The policy by itself, and inside Serve's own limits and delays on recorded loads."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig

from deployments import autoscaling
from deployments.autoscaling import (
    NAMESPACE,
    READ_TIMEOUT_S,
    RETRY_INTERVAL_S,
    LatestWish,
    LoadPolicy,
    OperatorWish,
    ReplicaLoad,
    WishKeys,
    ending_to_json,
    read_wish,
    read_wishes,
)

BUSY = ReplicaLoad(running=1.0, kv_usage=0.7)
IDLE = ReplicaLoad(running=0.0)


def context(
    loads: Sequence[ReplicaLoad],
    target: int,
    num_requests: float = 0.0,
    current: int | None = None,
    num_queued: float = 0.0,
) -> Any:
    """Return what Serve would tell the policy."""
    stats = [load.as_stats() for load in loads]
    return SimpleNamespace(
        app_name="app",
        deployment_name="m",
        running_replicas=[SimpleNamespace(unique_id=f"r{i}") for i in range(len(loads))],
        config=AutoscalingConfig(),
        current_num_replicas=len(loads) if current is None else current,
        target_num_replicas=target,
        total_num_requests=num_requests,
        total_queued_requests=num_queued,
        aggregated_metrics={
            name: {i: each[name] for i, each in enumerate(stats)} for name in BUSY.as_stats()
        },
        # The reports before the last one said that there was no load, and that nothing stays.
        raw_metrics={
            name: {
                i: [TimeStampedValue(0.0, value) for value in (0.0, each[name])]
                for i, each in enumerate(stats)
            }
            for name in BUSY.as_stats()
        },
    )


def served(policy: LoadPolicy, ctx: Any) -> int:
    """Return what Serve makes of the policy's decision, without delays."""
    ctx.config, ctx.policy_state = AutoscalingConfig(upscale_delay_s=0, downscale_delay_s=0), {}
    number, _ = _apply_autoscaling_config(policy)(ctx)  # type: ignore[arg-type] # a Protocol
    return number


@pytest.mark.parametrize(
    ("loads", "target", "expected"),
    [
        ([IDLE], 1, 0),
        ([ReplicaLoad(running=0.8)], 1, 1),
        ([ReplicaLoad(running=0.81)], 1, 2),
        ([ReplicaLoad(running=0.1, kv_usage=0.9)], 1, 2),
        ([replace(BUSY, waiting=1.4)], 1, 3),
        ([replace(BUSY, waiting=0.1, waiting_tokens=5000)], 1, 3),
        ([replace(BUSY, refused=1.0)], 1, 3),
        # Used lately, between two reports.
        ([replace(IDLE, recent=0.2)], 1, 1),
        # Between the thresholds nothing changes.
        ([ReplicaLoad(running=0.6)] * 2, 2, 2),
        ([ReplicaLoad(running=0.61)] * 1 + [IDLE], 2, 2),
        ([ReplicaLoad(running=0.6)] * 1 + [IDLE], 2, 1),
        ([ReplicaLoad(running=0.3)] * 3, 3, 2),
    ],
)
def test_replicas_follow_the_load(loads: Sequence[ReplicaLoad], target: int, expected: int) -> None:
    assert LoadPolicy()(context(loads, target)) == (expected, {})


def test_without_reports_there_is_no_load() -> None:
    none = SimpleNamespace(
        **vars(context([], 0)) | {"aggregated_metrics": None, "raw_metrics": None}
    )
    assert LoadPolicy()(none) == (0, {})


def test_probes_keep_no_replica_awake() -> None:
    probed = ReplicaLoad(running=0.0, kv_usage=0.01)
    assert LoadPolicy()(context([probed], 1, num_requests=0.2)) == (0, {})
    assert served(LoadPolicy(), context([probed], 1, num_requests=0.2)) == 0


def test_a_replica_that_has_not_reported_yet_is_kept() -> None:
    young = SimpleNamespace(**vars(context([IDLE], 1, num_requests=1)) | {"aggregated_metrics": {}})
    assert LoadPolicy()(young) == (1, {})
    assert served(LoadPolicy(), young) == 1


def test_a_request_that_finds_no_replica_wakes_one() -> None:
    assert served(LoadPolicy(), context([], 0, num_requests=1)) == 1


def test_the_load_of_a_missing_replica_counts_as_that_of_the_others() -> None:
    half = ReplicaLoad(running=0.6)
    assert LoadPolicy()(context([half, half, half], 3)) == (3, {})
    assert LoadPolicy()(context([half, half], 3, current=2)) == (3, {}), "one has died"
    low = ReplicaLoad(running=0.02)
    assert LoadPolicy()(context([low, IDLE], 3, current=2)) == (1, {}), "one can't be placed"
    alone = ReplicaLoad(running=0.55)
    assert LoadPolicy()(context([alone], 8, current=1)) == (2, {}), "seven can't be placed"
    assert LoadPolicy()(context([BUSY], 1, current=1)) == (2, {}), "no more than the load needs"
    assert LoadPolicy()(context([IDLE], 3, current=1)) == (0, {})


def test_no_replica_leaves_while_requests_are_on_their_way_to_one() -> None:
    """As after the death of the only replica, when another has just begun to serve."""
    assert LoadPolicy()(context([IDLE], 3, num_requests=40, num_queued=40)) == (3, {})
    assert LoadPolicy()(context([BUSY], 1, num_queued=40)) == (2, {}), "one may still come"
    assert LoadPolicy()(context([IDLE], 3, num_requests=2, num_queued=0.2)) == (0, {}), "in passing"


def test_thresholds_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not 0\.9, 0\.8 and 4096"):
        LoadPolicy(target_busy=0.8, busy_to_leave=0.9)
    with pytest.raises(ValueError, match="target_waiting_tokens > 0"):
        LoadPolicy(target_waiting_tokens=0)


def wishing(wish: OperatorWish, age_s: float = 30.0) -> LoadPolicy:
    """Return the policy of a model of which an operator has wanted something for a while."""
    now_s = 0.0
    latest = LatestWish(lambda application, deployment: wish, lambda: now_s)
    latest.of(context([], 0))
    now_s = age_s
    return LoadPolicy(wish=latest)


PINNED = OperatorWish(is_pinned=True)
DELAYED = AutoscalingConfig(min_replicas=0, downscale_delay_s=300, downscale_to_zero_delay_s=600)


def delayed(policy: LoadPolicy, ctx: Any) -> int:
    """Return what Serve makes of the policy's decision, with its delays."""
    ctx.config, ctx.policy_state = DELAYED, {}
    number, _ = _apply_autoscaling_config(policy)(ctx)  # type: ignore[arg-type] # a Protocol
    return number


def test_a_pinned_model_keeps_a_replica_and_has_as_many_as_its_load_needs() -> None:
    policy = wishing(PINNED)
    assert served(policy, context([IDLE], 1)) == 1
    assert served(policy, context([BUSY], 1)) == 2
    assert served(policy, context([IDLE] * 3, 3)) == 1
    assert policy(context([IDLE], 1)) == (1, {"is_pinned": True})


def test_a_pinned_model_that_sleeps_or_has_lost_its_replica_is_started() -> None:
    assert delayed(wishing(PINNED), context([], 0)) == 1
    assert delayed(wishing(PINNED), context([], 1)) == 1


def test_a_model_that_was_put_to_sleep_ends_without_delay_though_it_was_just_used() -> None:
    just_used = replace(IDLE, recent=1.0)
    policy = wishing(OperatorWish(ending=frozenset({"r0"})))
    assert delayed(policy, context([just_used], 1)) == 0
    assert delayed(policy, context([IDLE, just_used], 2)) == 1, "Serve goes to zero from one only"
    assert DELAYED.downscale_to_zero_delay_s == 600, "only for that decision"


def test_a_model_is_put_to_sleep_once_the_reports_have_all_that_came_before() -> None:
    wish = OperatorWish(ending=frozenset({"r0"}))
    assert DELAYED.look_back_period_s == 30
    assert delayed(wishing(wish, age_s=29.9), context([IDLE], 1)) == 1
    assert delayed(wishing(wish, age_s=30.0), context([IDLE], 1)) == 0


STAYS = replace(IDLE, kept=1.0)
ENDS = replace(IDLE, awake=0.0, ending=1.0)


def test_a_replica_that_sleeps_lightly_or_will_stays_without_load() -> None:
    assert LoadPolicy()(context([STAYS], 1)) == (1, {"is_kept": True})
    assert LoadPolicy()(context([STAYS] * 3, 3)) == (1, {"is_kept": True}), "the last one"
    assert served(LoadPolicy(), context([STAYS], 1)) == 1
    assert LoadPolicy()(context([replace(BUSY, kept=1.0)], 1)) == (2, {}), "by its load"


def test_a_process_that_has_slept_long_enough_ends_without_serve_s_delay() -> None:
    assert LoadPolicy()(context([ENDS], 1)) == (0, {})
    assert delayed(LoadPolicy(), context([ENDS], 1)) == 0
    assert delayed(LoadPolicy(), context([IDLE], 1)) == 1, "one that can't sleep lightly waits"
    assert DELAYED.downscale_to_zero_delay_s == 600, "only for that decision"


def test_of_several_sleepers_only_as_many_end_as_say_so() -> None:
    assert delayed(LoadPolicy(), context([STAYS, ENDS, STAYS], 3)) == 2
    assert delayed(LoadPolicy(), context([STAYS, ENDS], 1)) == 1, "no more than Serve wants"


@pytest.mark.parametrize(
    "used", [replace(ENDS, recent=0.2), replace(ENDS, running=0.1), replace(ENDS, waiting=0.1)]
)
def test_a_model_in_use_or_pinned_never_ends_by_what_its_replica_has_said(
    used: ReplicaLoad,
) -> None:
    assert delayed(LoadPolicy(), context([used], 1)) == 1
    assert delayed(LoadPolicy(), context([ENDS], 1, num_queued=1)) == 1
    assert delayed(wishing(PINNED), context([ENDS], 1)) == 1


def test_an_operator_ends_a_process_that_would_stay_for_its_light_sleep() -> None:
    wish = wishing(OperatorWish(ending=frozenset({"r0"})))
    assert delayed(wish, context([STAYS], 1)) == 0


@pytest.mark.parametrize(
    ("load", "num_queued"),
    [
        (ReplicaLoad(running=0.1), 0),
        (replace(IDLE, waiting=0.1), 0),
        (replace(IDLE, refused=0.1), 0),
        (IDLE, 1),
    ],
)
def test_a_model_that_was_put_to_sleep_first_does_its_work(
    load: ReplicaLoad, num_queued: float
) -> None:
    policy = wishing(OperatorWish(ending=frozenset({"r0"})))
    assert delayed(policy, context([load], 1, num_queued=num_queued)) == 1


def test_a_model_that_was_put_to_sleep_is_woken_by_a_request_and_runs_on() -> None:
    policy = wishing(OperatorWish(ending=frozenset({"gone"})))
    assert delayed(policy, context([], 0, num_requests=1)) == 1
    assert delayed(policy, context([IDLE], 1)) == 1, "its replica is not the one that was meant"


def test_a_wish_is_read_once_a_second_and_outlives_a_store_that_is_silent() -> None:
    now_s, asked = 0.0, []

    def read(application: str, deployment: str) -> OperatorWish:
        asked.append((application, deployment))
        if len(asked) == 2:
            raise RuntimeError("no answer")
        return PINNED if len(asked) == 1 else OperatorWish()

    wish, ctx = LatestWish(read, lambda: now_s), context([IDLE], 1)
    assert [wish.of(ctx) for _ in range(3)] == [PINNED] * 3
    assert asked == [("app", "m")]
    now_s = 1.0
    assert [wish.of(ctx) for _ in range(2)] == [PINNED] * 2
    now_s = 1.0 + RETRY_INTERVAL_S - 0.1
    assert wish.of(ctx) == PINNED
    assert len(asked) == 2, "the controller does not wait all the time for a store that is silent"
    now_s = 1.0 + RETRY_INTERVAL_S
    assert wish.of(ctx) == OperatorWish()
    now_s += 1.0
    wish.of(ctx)
    assert len(asked) == 4


class Store:
    """The part of Ray's control service that keeps wishes."""

    def __init__(self, stored: dict[bytes, bytes]) -> None:
        self._stored = stored
        self.questions: list[list[bytes]] = []
        self.is_silent = False

    def internal_kv_multi_get(
        self, keys: list[bytes], namespace: bytes, timeout: float
    ) -> dict[bytes, bytes]:
        assert (namespace, timeout) == (NAMESPACE, READ_TIMEOUT_S)
        self.questions.append(keys)
        if self.is_silent:
            raise TimeoutError
        return {key: self._stored[key] for key in keys if key in self._stored}


def test_the_wishes_for_all_models_are_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {name: WishKeys.of("app", name) for name in "abc"}
    ending = OperatorWish(ending=frozenset({"r1", "r2"}))
    store = Store(
        {
            keys["b"].pin: b"1",
            keys["c"].ending: ending_to_json(ending.ending),
            WishKeys.of("other", "a").pin: b"1",
        }
    )
    monkeypatch.setattr(autoscaling, "internal_kv_get_gcs_client", lambda: store)
    names = ("a", "b", "c")
    assert read_wishes("app", names) == {"a": OperatorWish(), "b": PINNED, "c": ending}
    assert store.questions == [[key for each in keys.values() for key in (each.pin, each.ending)]]
    assert read_wish("app", "b") == PINNED
    store.is_silent = True
    with pytest.raises(TimeoutError):
        read_wishes("app", names)
    assert len(store.questions) == 3, "a store that is silent is waited for once"


def test_without_ray_there_is_no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaling, "internal_kv_get_gcs_client", lambda: None)
    assert read_wishes("app", ("a", "b")) == dict.fromkeys("ab", OperatorWish())


@dataclass
class Simulated:
    """A model's replicas under Serve's own wrapper, which keeps limits and delays.

    Sequences arrive by number and take `SERVICE_S`; a replica needs `START_S` to start.
    """

    SLOTS = 16
    START_S = 8.0
    TICK_S = 0.5

    config: AutoscalingConfig
    now_s: float = 0.0
    num_sequences: int = 0
    targets: list[int] = field(default_factory=lambda: [1])
    _starting: list[float] = field(default_factory=list)
    _state: dict[str, Any] = field(default_factory=dict)
    _num_running: int = 1

    def __post_init__(self) -> None:
        self._policy = _apply_autoscaling_config(LoadPolicy())  # type: ignore[arg-type] # a Protocol

    def tick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the policy decide on the current number of sequences."""
        self.now_s += self.TICK_S
        monkeypatch.setattr("time.time", lambda: self.now_s)
        target = self.targets[-1]
        arrived = sum(at_s <= self.now_s for at_s in self._starting)
        self._num_running = min(target, self._num_running + arrived)
        self._starting = [at_s for at_s in self._starting if at_s > self.now_s]
        running = min(self.num_sequences, self.SLOTS * self._num_running)
        num_waiting = self.num_sequences - running
        load = ReplicaLoad(
            running / self.SLOTS / self._num_running,
            num_waiting / self.SLOTS / self._num_running,
            waiting_tokens=200 * num_waiting / self._num_running,
        )
        loads = [load] * self._num_running
        ctx = context(loads, target, self.num_sequences)
        ctx.config, ctx.policy_state = self.config, dict(self._state)
        decided, self._state = self._policy(ctx)
        decided = min(max(decided, self.config.min_replicas), self.config.max_replicas)
        self._starting += [self.now_s + self.START_S] * max(0, decided - target)
        self.targets.append(decided)

    @property
    def num_turns(self) -> int:
        """How often the target has changed its direction."""
        steps = [b - a for a, b in pairwise(self.targets) if a != b]
        return sum(a * b < 0 for a, b in pairwise(steps))


@pytest.fixture
def simulated() -> Simulated:
    config = AutoscalingConfig(
        min_replicas=1, max_replicas=3, upscale_delay_s=1, downscale_delay_s=30
    )
    return Simulated(config)


def test_a_burst_every_20_s_does_not_make_replicas_come_and_go(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(9):
        for number in [40] * 4 + [20, 10, 5, 2] + [0] * 32:  # 2 s, its tail, and silence
            simulated.num_sequences = number
            simulated.tick(monkeypatch)
    assert max(simulated.targets) == 3
    assert simulated.num_turns == 0


def test_a_ramp_and_silence_raise_the_target_step_by_step_and_lower_it_once(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(240):
        simulated.num_sequences = number // 6
        simulated.tick(monkeypatch)
    up = simulated.targets.copy()
    assert up == sorted(up)
    assert up[-1] == 3
    simulated.num_sequences = 0
    for _ in range(70):
        simulated.tick(monkeypatch)
    assert simulated.targets[-1] == 1
    assert simulated.num_turns == 1


def test_a_load_that_swings_about_a_threshold_changes_nothing(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in [12, 14] * 400:  # 0.75 and 0.88 of a replica: one more from 0.8
        simulated.num_sequences = number
        simulated.tick(monkeypatch)
    assert set(simulated.targets) == {1}
