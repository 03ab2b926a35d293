"""The policy of turns by simulation, and behind Serve's own wrapper of policies."""

import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from benchmarks.turns.foresight import least_loads
from deployments.autoscaling import LatestWish, LoadPolicy, OperatorWish
from deployments.turns import ModelState, TurnPolicy, Turns

TICK_S = 0.5
START_S = 8.0
"""From the decision to a running replica: one process ends, and another one loads."""

MIN_TURN_S = 30.0
IDLE = ModelState(is_running=False, is_wanted=False, has_work=False)
WAITS = ModelState(is_running=False, is_wanted=False, has_work=True)
WORKS = ModelState(is_running=True, is_wanted=True, has_work=True)
RESTS = ModelState(is_running=True, is_wanted=True, has_work=False)


@dataclass
class Asked:
    """One request: when it comes, and how much of its model's time it needs."""

    model: str
    came_s: float
    work_s: float
    begun_s: float | None = None
    turns_waited: int = 0
    is_done: bool = False


@dataclass
class Device:
    """A device with room for one model, whose turns `Turns` decides; requests run side by side."""

    turns: Turns
    requests: list[Asked]
    models: Sequence[str]
    breaks: frozenset[str] = frozenset()  # models that never load
    holders: list[tuple[float, str]] = field(default_factory=list)
    now_s: float = 0.0
    ready_s: float = 0.0

    def run(self, until_s: float) -> None:
        """Go on from the first request until all are done, or this time."""
        self.now_s = min(each.came_s for each in self.requests)
        while self.now_s < until_s and not all(each.is_done for each in self.requests):
            self._tick()

    def _tick(self) -> None:
        here = [each for each in self.requests if each.came_s <= self.now_s and not each.is_done]
        with_work = {each.model for each in here}
        holder = self.holders[-1][1] if self.holders else None
        states = {
            name: ModelState(
                is_running=name == holder and self._is_ready,
                is_wanted=name == holder,
                has_work=name in with_work,
            )
            for name in self.models
        }
        now = self.turns.update(self.now_s, states)
        if now != holder:
            self.holders.append((self.now_s, now))
            self.ready_s = self.now_s + START_S
            for each in here:
                each.turns_waited += each.model != now
        if self._is_ready:
            for each in here:
                if each.model == now:
                    self._work(each)
        self.now_s += TICK_S

    @property
    def _is_ready(self) -> bool:
        return self.now_s >= self.ready_s and self.holders[-1][1] not in self.breaks

    def _work(self, each: Asked) -> None:
        if each.begun_s is None:
            each.begun_s = self.now_s
        each.work_s -= TICK_S
        each.is_done = each.work_s <= 0

    @property
    def num_loads(self) -> int:
        return len(self.holders)


def device(requests: Iterable[Asked], models: str, **changed: Any) -> Device:
    turns = Turns(models, changed.pop("min_turn_s", MIN_TURN_S), changed.pop("max_start_s", 600))
    return Device(turns, list(requests), models, **changed)


def test_requests_for_a_b_a_a_c_at_once_need_each_model_once() -> None:
    found = device([Asked(each, 0.0, 5.0) for each in "ABAAC"], "ABC")
    found.run(600)
    assert [model for _, model in found.holders] == ["A", "B", "C"]


@pytest.mark.parametrize("seed", range(12))
def test_three_models_load_at_most_twice_as_often_as_with_foresight(seed: int) -> None:
    chance = random.Random(seed)
    requests = [
        Asked(chance.choice("ABAAC"), round(chance.uniform(0, 180), 1), chance.uniform(1, 20))
        for _ in range(chance.choice((5, 12, 30)))
    ]
    found = device(requests, "ABC")
    found.run(3600)
    assert all(each.is_done for each in found.requests)
    assert max(each.turns_waited for each in found.requests) <= 3, "nobody waits for more turns"
    waits = [each.begun_s - each.came_s for each in found.requests if each.begun_s is not None]
    known = [(each.model, each.came_s) for each in requests]
    assert found.num_loads <= 2 * least_loads(known, max(waits))


def test_models_that_always_have_work_get_turns_in_order_of_the_least_length() -> None:
    always = [Asked(each, 0.0, 1e9) for each in "ABC"]
    found = device(always, "ABC")
    found.run(300)
    names = [model for _, model in found.holders]
    assert names == (["A", "B", "C"] * len(names))[: len(names)]
    lengths = {late - early for (early, _), (late, _) in pairwise(found.holders)}
    assert lengths == {START_S + MIN_TURN_S}


def test_a_model_keeps_its_turn_while_no_other_waits() -> None:
    found = device([Asked("A", 0.0, 500.0), Asked("B", 400.0, 1.0)], "AB")
    found.run(1000)
    assert [model for _, model in found.holders] == ["A", "B", "A"]
    assert found.holders[1][0] == pytest.approx(400.0), "the turn of A had lasted long enough"


def test_an_idle_model_leaves_at_once_when_another_waits() -> None:
    turns = Turns("AB", MIN_TURN_S, 600)
    assert turns.update(0, {"A": WORKS, "B": IDLE}) == "A"
    assert turns.update(1, {"A": WORKS, "B": WAITS}) == "A"
    assert turns.update(2, {"A": RESTS, "B": WAITS}) == "B"


def test_the_one_that_has_waited_longest_is_next() -> None:
    turns = Turns("ABC", MIN_TURN_S, 600)
    turns.update(0, {"A": WORKS, "B": IDLE, "C": IDLE})
    turns.update(1, {"A": WORKS, "B": IDLE, "C": WAITS})
    turns.update(2, {"A": WORKS, "B": WAITS, "C": WAITS})
    assert turns.update(MIN_TURN_S, {"A": WORKS, "B": WAITS, "C": WAITS}) == "C"


def test_a_model_that_no_longer_waits_gets_no_turn() -> None:
    turns = Turns("AB", MIN_TURN_S, 600)
    turns.update(0, {"A": WORKS, "B": WAITS})
    assert turns.update(MIN_TURN_S, {"A": WORKS, "B": IDLE}) == "A"


def test_a_model_whose_replica_has_died_keeps_its_turn_until_it_runs_again() -> None:
    turns = Turns("AB", MIN_TURN_S, 600)
    turns.update(0, {"A": WORKS, "B": WAITS})
    assert turns.update(MIN_TURN_S + 1, {"A": WAITS, "B": WAITS}) == "A"
    assert turns.update(MIN_TURN_S + 9, {"A": WORKS, "B": WAITS}) == "B"


def test_a_model_that_never_loads_gives_its_turn_back() -> None:
    requests = [Asked("A", 0.0, 100.0), Asked("B", 0.0, 1.0)]
    found = device(requests, "AB", breaks=frozenset("B"), max_start_s=60.0)
    found.run(400)
    assert requests[0].is_done
    assert [model for _, model in found.holders][:3] == ["A", "B", "A"]


def test_a_model_whose_requests_got_their_error_gives_its_turn_back_at_once() -> None:
    turns = Turns("AB", MIN_TURN_S, 600)
    turns.update(0, {"A": WORKS, "B": WAITS})
    turns.update(MIN_TURN_S, {"A": WORKS, "B": WAITS})
    assert turns.update(MIN_TURN_S + 20, {"A": WAITS, "B": WAITS}) == "B"
    assert turns.update(MIN_TURN_S + 21, {"A": WAITS, "B": IDLE}) == "A"


def test_a_new_controller_goes_on_with_the_model_that_runs() -> None:
    turns = Turns("ABC", MIN_TURN_S, 600)
    assert turns.update(0, {"A": WAITS, "B": WORKS, "C": WAITS}) == "B"


def test_at_the_start_the_first_model_that_shall_run_goes_first() -> None:
    starts = ModelState(is_running=False, is_wanted=True, has_work=False)
    assert Turns("AB", MIN_TURN_S, 600).update(0, {"A": starts, "B": starts}) == "A"


SHIPPED: Mapping[str, Any] = MappingProxyType(
    {
        "min_replicas": 0,
        "max_replicas": 2,
        "upscale_delay_s": 0,
        "downscale_delay_s": 300,
        "downscale_to_zero_delay_s": 600,
    }
)


class Serve:
    """Serve's controller as far as it asks a policy: contexts by deployment, and their states."""

    def __init__(self, policy: TurnPolicy, *names: str) -> None:
        unchecked: Any = policy  # its protocol is the part of Serve's context that it reads
        self._policy = _apply_app_level_autoscaling_config(unchecked)
        self.configs = {name: AutoscalingConfig(**SHIPPED) for name in names}
        for config in self.configs.values():
            config.policy._cached_policy = None
        self.running = dict.fromkeys(names, 0)
        self.targets = dict.fromkeys(names, 0)
        self.requests = dict.fromkeys(names, 0.0)
        self.reports: dict[str, dict[str, list[float]]] = {name: {} for name in names}
        self._states: dict[DeploymentID, dict[str, Any]] = {}

    def decide(self) -> dict[str, int]:
        """Ask the policy; return the targets, which are now reached."""
        contexts = {
            DeploymentID(name, "app"): self.context(name, config)
            for name, config in self.configs.items()
        }
        decided, self._states = self._policy(contexts)
        self.targets |= {key.name: number for key, number in decided.items()}
        return dict(self.targets)

    def context(self, name: str, config: AutoscalingConfig) -> AutoscalingContext:
        key = DeploymentID(name, "app")
        return AutoscalingContext(
            deployment_id=key,
            deployment_name=name,
            app_name="app",
            current_num_replicas=self.running[name],
            target_num_replicas=self.targets[name],
            running_replicas=[ReplicaID("r", key)] * self.running[name],
            total_num_requests=self.requests[name],
            total_queued_requests=self.requests[name],
            aggregated_metrics=self._by_replica(name, lambda values: sum(values) / len(values)),
            raw_metrics=self._by_replica(
                name, lambda values: [TimeStampedValue(0.0, value) for value in values]
            ),
            capacity_adjusted_min_replicas=0,
            capacity_adjusted_max_replicas=2,
            policy_state=self._states.get(key, {}),
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=0.0,
            config=config,
        )

    def report(self, name: str, **figures: float) -> None:
        """Let the replica of a model report once more, beside what it has reported before."""
        for figure, value in figures.items():
            self.reports[name].setdefault(figure, []).append(value)

    def _by_replica(
        self, name: str, told: Callable[[list[float]], Any]
    ) -> dict[str, dict[ReplicaID, Any]] | None:
        if not self.running[name]:  # Serve forgets what is gone
            self.reports[name] = {}
        replica = ReplicaID("r", DeploymentID(name, "app"))
        return {
            figure: {replica: told(values)} for figure, values in self.reports[name].items()
        } or None


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def serve(*names: str, **groups: Sequence[str]) -> tuple[Serve, Time]:
    clock = Time()
    return Serve(TurnPolicy(groups, min_turn_s=30, now_s=clock), *names), clock


def test_serve_starts_no_model_out_of_its_turn_and_stops_one_without_its_delays() -> None:
    controller, clock = serve("A", "B", gpu=["A", "B"])
    controller.requests |= {"A": 1, "B": 1}
    assert controller.decide() == {"A": 1, "B": 0}
    controller.running["A"] = 1
    assert controller.decide() == {"A": 1, "B": 0}
    clock.now_s = 29
    assert controller.decide() == {"A": 1, "B": 0}
    clock.now_s = 30
    assert controller.decide()["A"] == 0
    controller.running["A"] = 0  # its streams are parked, and its requests wait
    assert controller.decide() == {"A": 0, "B": 1}
    assert controller.configs["A"].downscale_to_zero_delay_s == 600, "only for that decision"


IN_THE_CONTROLLER = """
import sys

class Elsewhere:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "deployments":
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Elsewhere())
from ray import cloudpickle

policy, contexts = cloudpickle.load(sys.stdin.buffer)
numbers, _ = policy.get_policy()(**policy.policy_kwargs)(contexts)
for key, number in numbers.items():
    print(key.name, number, contexts[key].config.downscale_delay_s)
"""
"""Asks a policy where only Ray is installed, and prints what it returns and the delays left."""


def named_policy(name: str, **arguments: Any) -> AutoscalingPolicy:
    """Return what Serve makes of a policy that a file names."""
    return AutoscalingPolicy(policy_function=name, **arguments)  # type: ignore[no-untyped-call] # left untyped


@pytest.mark.slow
def test_serve_takes_the_policies_to_a_process_without_our_modules() -> None:
    kwargs = {"groups": {"gpu": ["A", "B"], "cpu": ["C", "D"]}, "light": ["cpu"]}
    policy = named_policy("deployments.turns:TurnPolicy", policy_kwargs=kwargs)
    controller, _ = serve("A", "B")
    controller.running |= {"A": 1, "B": 1}
    controller.targets |= {"A": 1, "B": 1}
    own = named_policy("deployments.autoscaling:LoadPolicy")
    contexts = {
        DeploymentID(name, "app"): controller.context(
            name, AutoscalingConfig(**SHIPPED, policy=own)
        )
        for name in "AB"
    }
    done = subprocess.run(
        [sys.executable, "-c", IN_THE_CONTROLLER],
        input=cloudpickle.dumps((policy, contexts)),  # type: ignore[no-untyped-call] # left untyped
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == ["A 1 300.0", "B 0 0.0"]


def test_a_pinned_model_keeps_its_turn_until_it_is_unpinned() -> None:
    pinned = ModelState(is_running=True, is_wanted=True, has_work=True, is_pinned=True)
    turns = Turns("AB", MIN_TURN_S, 600)
    assert turns.update(0, {"A": pinned, "B": WAITS}) == "A"
    assert turns.update(100 * MIN_TURN_S, {"A": pinned, "B": WAITS}) == "A"
    assert turns.update(100 * MIN_TURN_S + 1, {"A": RESTS, "B": WAITS}) == "B"


def test_a_pinned_model_that_never_loads_gives_its_turn_back() -> None:
    missing = ModelState(is_running=False, is_wanted=True, has_work=True, is_pinned=True)
    turns = Turns("AB", MIN_TURN_S, 600)
    assert turns.update(0, {"A": missing, "B": WAITS}) == "A"
    assert turns.update(599, {"A": missing, "B": WAITS}) == "A"
    assert turns.update(600, {"A": missing, "B": WAITS}) == "B"


def wishes_of(controller: Serve, clock: Time, name: str) -> list[OperatorWish]:
    """Let a model be scaled by its load, and by the last of the wishes that are returned."""
    wishes = [OperatorWish()]
    latest = LatestWish(lambda application, deployment: wishes[-1], clock)
    policy: Any = LoadPolicy(wish=latest)
    controller.configs[name].policy._cached_policy = policy
    return wishes


def test_a_pinned_model_without_requests_waits_for_its_turn_and_then_keeps_it() -> None:
    controller, clock = serve("A", "B", gpu=["A", "B"])
    wishes = wishes_of(controller, clock, "B")
    controller.requests["A"] = 1
    assert controller.decide() == {"A": 1, "B": 0}
    controller.running["A"] = 1
    wishes.append(OperatorWish(is_pinned=True))
    clock.now_s = 29
    assert controller.decide() == {"A": 1, "B": 0}
    clock.now_s = 59
    assert controller.decide()["A"] == 0
    controller.running |= {"A": 0, "B": 1}
    assert controller.decide() == {"A": 0, "B": 1}
    clock.now_s = 3000
    assert controller.decide() == {"A": 0, "B": 1}, "requests of A wait"
    wishes.append(OperatorWish())
    clock.now_s = 3001
    assert controller.decide()["B"] == 0
    controller.running["B"] = 0
    assert controller.decide() == {"A": 1, "B": 0}


def test_a_model_that_was_put_to_sleep_in_its_turn_ends_without_delay() -> None:
    controller, clock = serve("A", "B", gpu=["A", "B"])
    wishes_of(controller, clock, "A").append(OperatorWish(ending=frozenset({"r"})))
    controller.running["A"] = controller.targets["A"] = 1
    assert controller.decide() == {"A": 1, "B": 0}
    clock.now_s = 30
    assert controller.decide() == {"A": 0, "B": 0}


def test_several_replicas_leave_together_when_a_turn_is_over() -> None:
    controller, clock = serve("A", "B", gpu=["A", "B"])
    controller.requests |= {"A": 8, "B": 1}
    controller.decide()
    controller.running["A"] = controller.targets["A"] = 2
    controller.decide()
    clock.now_s = 31
    controller.decide()
    assert controller.decide() == {"A": 0, "B": 1}, "Serve goes to zero from one only"


def test_deployments_without_a_group_are_scaled_by_their_own_policies() -> None:
    controller, _ = serve("A", "B", "C", gpu=["A", "B"])
    controller.running |= {"A": 1, "C": 1}
    controller.targets |= {"A": 1, "C": 1}
    controller.requests |= {"A": 1, "C": 5}
    assert controller.decide() == {"A": 1, "B": 0, "C": 3}, "half of 5 requests each, rounded up"


def test_ids_with_slashes_are_those_of_their_deployments() -> None:
    controller, _ = serve("org--A", "org--B", gpu=["org/A", "org/B"])
    controller.requests |= {"org--A": 1, "org--B": 1}
    assert controller.decide() == {"org--A": 1, "org--B": 0}


def test_a_model_that_hangs_while_it_starts_is_stopped_although_requests_wait_for_it() -> None:
    controller, clock = serve("A", "B", gpu=["A", "B"])
    controller.requests |= {"A": 1, "B": 1}
    assert controller.decide() == {"A": 1, "B": 0}
    clock.now_s = 600
    assert controller.decide() == {"A": 0, "B": 1}


class Holders:
    """The key-value store of Ray's control service, as far as it says who has a turn."""

    def __init__(self, **stored: str) -> None:
        self.stored = stored
        self.num_asked = 0
        self.is_silent = False

    def read(self, application: str, group: str) -> str | None:
        assert application == "app"
        self._answer()
        return self.stored.get(group)

    def write(self, application: str, group: str, deployment: str) -> None:
        assert application == "app"
        self._answer()
        self.stored[group] = deployment

    def _answer(self) -> None:
        self.num_asked += 1
        if self.is_silent:
            raise TimeoutError("no answer")


def light(holders: Holders, *names: str) -> tuple[Serve, Time]:
    """Return a controller of models that take turns, sleep in between and are scaled by load."""
    clock = Time()
    policy = TurnPolicy(
        {"cpu": names},
        min_turn_s=30,
        light=["cpu"],
        now_s=clock,
        read=holders.read,
        write=holders.write,
    )
    controller = Serve(policy, *names)
    for name in names:
        wishes_of(controller, clock, name)
    return controller, clock


AWAKE = {"awake": 1.0, "running": 0.0, "waiting": 0.0, "recent": 0.0}
WORKING = AWAKE | {"running": 0.5, "recent": 1.0}
ASLEEP = AWAKE | {"awake": 0.0}
ASKED = ASLEEP | {"running": 0.1}
"""Requests wait for a model that sleeps: its replica has taken them, and counts them as running."""


def loaded(holders: Holders, **requests: float) -> tuple[Serve, Time]:
    """Return a controller of A and B, whose replicas run, with the mean of each one's requests."""
    controller, clock = light(holders, "A", "B")
    controller.running |= {"A": 1, "B": 1}
    controller.targets |= {"A": 1, "B": 1}
    controller.requests |= requests
    return controller, clock


def both_running(holders: Holders) -> tuple[Serve, Time]:
    """Return a controller of A, which works in its turn, and of B, which sleeps."""
    controller, clock = loaded(holders, A=1.0)
    controller.report("A", **WORKING)
    controller.report("B", **ASLEEP)
    assert controller.decide() == {"A": 1, "B": 1}
    assert holders.stored == {"cpu": "A"}
    return controller, clock


def test_models_of_a_light_group_keep_their_replicas_when_the_turn_goes_on() -> None:
    holders = Holders()
    controller, clock = both_running(holders)
    controller.requests |= {"B": 1.0}
    controller.report("B", **ASKED)
    clock.now_s = 29
    assert controller.decide() == {"A": 1, "B": 1}
    assert holders.stored == {"cpu": "A"}
    clock.now_s = 30
    assert controller.decide() == {"A": 1, "B": 1}
    assert holders.stored == {"cpu": "B"}
    assert controller.configs["A"].downscale_to_zero_delay_s == 600


def test_a_model_of_a_light_group_that_has_no_replica_gets_one_in_its_turn() -> None:
    holders = Holders()
    controller, clock = light(holders, "A", "B")
    controller.requests |= {"A": 1, "B": 1}
    assert controller.decide() == {"A": 1, "B": 0}
    controller.running["A"] = 1
    controller.report("A", **WORKING)
    assert controller.decide() == {"A": 1, "B": 0}
    clock.now_s = 30
    assert controller.decide() == {"A": 1, "B": 1}
    assert holders.stored == {"cpu": "B"}


def test_a_turn_lasts_from_when_its_model_is_awake() -> None:
    holders = Holders(cpu="B")
    controller, clock = loaded(holders, A=1.0, B=1.0)
    for name in "AB":
        controller.report(name, **ASKED)
    controller.decide()
    clock.now_s = 40
    controller.report("B", **WORKING)
    controller.decide()
    clock.now_s = 69
    controller.decide()
    assert holders.stored == {"cpu": "B"}
    clock.now_s = 70
    controller.decide()
    assert holders.stored == {"cpu": "A"}


def test_a_model_that_never_wakes_gives_its_turn_back_and_one_that_sleeps_idle_does_at_once() -> (
    None
):
    holders = Holders(cpu="B")
    controller, clock = loaded(holders, A=1.0, B=1.0)
    for name in "AB":
        controller.report(name, **ASKED)
    controller.decide()
    clock.now_s = 599
    controller.decide()
    assert holders.stored == {"cpu": "B"}
    clock.now_s = 600
    controller.decide()
    assert holders.stored == {"cpu": "A"}
    controller.requests |= {"A": 0.0}
    controller.reports["A"] = {}
    controller.report("A", **ASLEEP)
    clock.now_s = 601
    controller.decide()
    assert holders.stored == {"cpu": "B"}, "A sleeps, and nobody asks it"


def test_a_new_controller_goes_on_with_the_holder_that_was_published() -> None:
    holders = Holders(cpu="B")
    controller, _ = loaded(holders, A=1.0, B=1.0)
    controller.report("A", **WORKING)  # its last report, from its turn
    controller.report("B", **ASKED)
    controller.decide()
    assert holders.stored == {"cpu": "B"}
    assert holders.num_asked == 1, "it was read, and written no second time"


def test_a_holder_that_has_left_its_group_is_not_one() -> None:
    holders = Holders(cpu="gone")
    both_running(holders)


def test_while_the_store_is_silent_nothing_is_swapped_or_stopped_and_it_is_seldom_asked() -> None:
    holders = Holders(cpu="B")
    holders.is_silent = True
    controller, clock = loaded(holders, A=1.0, B=1.0)
    for name in "AB":
        controller.report(name, **ASKED)
    for tenth in range(99):
        clock.now_s = tenth / 10
        assert controller.decide() == {"A": 1, "B": 1}
    assert holders.num_asked == 1
    holders.is_silent = False
    clock.now_s = 10
    assert controller.decide() == {"A": 1, "B": 1}
    assert holders.stored == {"cpu": "B"}


def test_a_holder_that_could_not_be_written_is_written_later() -> None:
    holders = Holders()
    controller, clock = both_running(holders)
    controller.requests |= {"B": 1.0}
    controller.report("B", **ASKED)
    holders.is_silent = True
    clock.now_s = 30
    controller.decide()
    assert holders.stored == {"cpu": "A"}
    holders.is_silent = False
    clock.now_s = 40
    controller.decide()
    assert holders.stored == {"cpu": "B"}


def test_neither_probes_nor_what_was_answered_a_moment_ago_wait_for_a_turn() -> None:
    holders = Holders()
    controller, clock = both_running(holders)
    controller.requests |= {"B": 0.1}  # a list of models asks its replica
    controller.report("B", **WORKING)
    controller.report("B", **ASLEEP | {"recent": 1.0})
    clock.now_s = 31
    controller.decide()
    assert holders.stored == {"cpu": "A"}
    controller.requests |= {"B": 1.0}  # an operator wakes it, which is in no figure of its own
    controller.decide()
    assert holders.stored == {"cpu": "B"}


def test_a_holder_that_sleeps_and_only_counts_tokens_holds_nobody_up() -> None:
    holders = Holders()
    controller, clock = both_running(holders)
    controller.requests |= {"A": 0.1, "B": 1.0}
    controller.report("A", **ASLEEP | {"recent": 1.0})
    controller.report("B", **ASKED)
    clock.now_s = 1
    controller.decide()
    assert holders.stored == {"cpu": "B"}


def test_a_holder_that_has_not_reported_yet_keeps_its_turn() -> None:
    holders = Holders(cpu="A")
    controller, clock = loaded(
        holders, A=0.2, B=1.0
    )  # the mean still holds seconds without a request
    controller.report("B", **ASKED)
    clock.now_s = 1
    controller.decide()
    assert holders.stored == {"cpu": "A"}


def test_a_sleeper_ends_by_its_own_policy_unless_requests_wait_for_its_turn() -> None:
    holders = Holders()
    controller, _ = both_running(holders)
    config = controller.configs["B"] = AutoscalingConfig(
        **{**SHIPPED, "downscale_to_zero_delay_s": 0}
    )
    config.policy._cached_policy = controller.configs["A"].policy.get_policy()
    controller.requests |= {"B": 1.0}
    assert controller.decide() == {"A": 1, "B": 1}
    controller.requests |= {"B": 0.0}
    assert controller.decide() == {"A": 1, "B": 0}


def test_a_sleeper_that_has_died_starts_only_in_its_turn() -> None:
    holders = Holders()
    controller, clock = both_running(holders)
    controller.running["B"] = 0
    controller.requests |= {"B": 1.0}
    clock.now_s = 20
    assert controller.decide() == {"A": 1, "B": 0}
    clock.now_s = 50
    assert controller.decide() == {"A": 1, "B": 1}


def test_a_new_controller_that_has_not_found_a_sleeper_yet_does_not_stop_it() -> None:
    holders = Holders(cpu="A")
    controller, clock = light(holders, "A", "B")
    controller.targets |= {"A": 1, "B": 1}
    controller.requests |= {"A": 1.0}
    assert controller.decide() == {"A": 1, "B": 1}
    clock.now_s = 19
    assert controller.decide() == {"A": 1, "B": 1}
    controller.running |= {"A": 1, "B": 1}
    clock.now_s = 100
    assert controller.decide() == {"A": 1, "B": 1}


def test_a_pinned_sleeper_gets_its_turn_and_keeps_it() -> None:
    holders = Holders()
    controller, clock = both_running(holders)
    controller.configs["B"] = AutoscalingConfig(**SHIPPED)
    wishes_of(controller, clock, "B").append(OperatorWish(is_pinned=True))
    clock.now_s = 30
    controller.decide()
    controller.decide()
    assert holders.stored == {"cpu": "B"}
    controller.report("B", **AWAKE)
    controller.report("A", **ASKED)
    clock.now_s = 300
    controller.decide()
    assert holders.stored == {"cpu": "B"}
