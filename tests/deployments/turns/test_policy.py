"""The policy of turns behind Serve's own wrapper of policies."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from ray import cloudpickle
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_app_level_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from deployments.autoscaling import LatestWish, LoadPolicy, OperatorWish
from deployments.turns import TurnPolicy

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


def serve(*names: str, **groups: Sequence[str] | Mapping[str, float]) -> tuple[Serve, Time]:
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


def test_a_model_that_stays_only_for_its_light_sleep_has_no_work_in_its_turn() -> None:
    controller, _ = serve("A", "B", gpu=["A", "B"])
    for config in controller.configs.values():
        config.policy = named_policy("deployments.autoscaling:LoadPolicy")
    controller.requests["A"] = 1
    assert controller.decide() == {"A": 1, "B": 0}
    controller.running["A"] = 1
    controller.requests["A"] = 0
    controller.report("A", running=0.0, kept=1.0)
    assert controller.decide() == {"A": 1, "B": 0}, "nobody else wants the turn"
    controller.requests["B"] = 1
    assert controller.decide()["A"] == 0, "within `min_turn_s`"
    controller.running["A"] = 0
    assert controller.decide() == {"A": 0, "B": 1}


@pytest.mark.parametrize(("ending", "left"), [(0.0, 1), (1.0, 0)])
def test_a_sleeper_of_a_light_group_ends_when_it_says_so(ending: float, left: int) -> None:
    clock = Time()
    published: dict[str, str] = {}
    policy = TurnPolicy(
        {"cpu": ["A", "B"]},
        light=["cpu"],
        now_s=clock,
        read=lambda application, group: published.get(group),
        write=lambda application, group, holder: published.__setitem__(group, holder),
    )
    controller = Serve(policy, "A", "B")
    for config in controller.configs.values():
        config.policy = named_policy("deployments.autoscaling:LoadPolicy")
    controller.running |= {"A": 1, "B": 1}
    controller.targets |= {"A": 1, "B": 1}
    controller.report("A", running=0.5, awake=1.0, kept=1.0)
    controller.report("B", running=0.0, awake=0.0, kept=1.0 - ending, ending=ending)
    assert controller.decide() == {"A": 1, "B": left}
    assert published == {"cpu": "A"}


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


def test_models_whose_parts_fit_get_replicas_together_and_a_large_one_when_both_have_ended() -> (
    None
):
    controller, clock = serve("A", "org--B", "L", gpu={"A": 0.5, "org/B": 0.5, "L": 0.9})
    controller.requests |= {"A": 1, "org--B": 1, "L": 1}
    assert controller.decide() == {"A": 1, "org--B": 1, "L": 0}
    controller.running |= {"A": 1, "org--B": 1}
    assert controller.decide() == {"A": 1, "org--B": 1, "L": 0}
    clock.now_s = 30
    assert controller.decide() == {"A": 0, "org--B": 0, "L": 1}


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
