"""When the process of a replica that sleeps lightly is to end."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from deployments.contract.model_spec import MIN_AUTO_SLEEP_S, ModelConfig, ModelSpec
from deployments.plan import cgroup
from deployments.plan.replica_report import LightSleep, SleepState
from deployments.replica.deep_sleep import (
    MAX_FAILURES,
    RELIEVED_USED,
    SHORT_USED,
    DeepSleep,
    MemoryPressure,
    SleepersLine,
)
from deployments.replica.own_scaling import LOAD_POLICY, to_zero_delay_s
from tests.deployments.replica.test_own_scaling import be_replica

ASLEEP_UNIX_S = 1000.0
TO_ZERO_S = 300.0
DEEP_S = 60.0


class Replica:
    """A replica, its node's memory and Serve's settings, by hand."""

    def __init__(self, folder: Path, turn_group: str | None = None, **entry: Any) -> None:
        self.used = 0.5
        self.to_zero_s: float | None = TO_ZERO_S
        self.now_unix_s = ASLEEP_UNIX_S
        self.sleeper: Any = SimpleNamespace(
            state=SleepState.ASLEEP,
            is_in_use=False,
            ends_instead=False,
            num_failures=0,
            report=LightSleep(SleepState.ASLEEP, ASLEEP_UNIX_S),
        )
        model = ModelConfig(id="m", source="nowhere", **{"deep_sleep_after_s": DEEP_S} | entry)
        self.deep = DeepSleep(
            ModelSpec(model, "nowhere", 0, turn_group=turn_group),
            MemoryPressure(lambda: self.used),
            lambda: self.to_zero_s,
            SleepersLine(lambda: folder),
            lambda: self.now_unix_s,
        )

    def told(self) -> tuple[bool, bool]:
        """Look, and return whether the process is kept, and whether it is ending."""
        self.deep.look(self.sleeper)
        return self.deep.is_kept(self.sleeper), self.deep.is_ending(self.sleeper)

    def be(self, state: SleepState) -> None:
        self.sleeper.state = state


STAYS, ENDS, AS_BEFORE = (True, False), (False, True), (False, False)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Replica]]:
    """Return a maker of replicas, which leave the line at the end of the test."""
    with ExitStack() as stack:

        def made(**entry: Any) -> Replica:
            replica = Replica(tmp_path, **entry)
            stack.callback(replica.deep.close)
            return replica

        yield made


@pytest.fixture
def replica(make: Callable[..., Replica]) -> Replica:
    return make()


def test_a_sleeper_stays_until_it_has_slept_for_long_enough(replica: Replica) -> None:
    assert replica.told() == STAYS
    replica.now_unix_s += DEEP_S - 0.1
    assert replica.told() == STAYS
    replica.now_unix_s += 0.1
    assert replica.told() == ENDS
    report = replica.deep.report(replica.sleeper)
    assert report is not None
    assert (report.ends_unix_s, report.is_ending) == (ASLEEP_UNIX_S + DEEP_S, True)


def test_one_that_is_awake_is_kept_until_it_sleeps(replica: Replica) -> None:
    replica.now_unix_s += 10 * DEEP_S
    replica.be(SleepState.AWAKE)
    assert replica.told() == STAYS
    report = replica.deep.report(replica.sleeper)
    assert report is not None
    assert (report.ends_unix_s, report.is_ending) == (None, False)


def test_one_for_which_a_request_waits_never_ends(replica: Replica) -> None:
    replica.sleeper.is_in_use = True
    replica.now_unix_s += 10 * DEEP_S
    replica.used = 1.0
    assert replica.told() == STAYS


def test_one_that_serve_keeps_or_that_another_policy_scales_says_nothing(replica: Replica) -> None:
    replica.to_zero_s = None
    replica.now_unix_s += 10 * DEEP_S
    replica.used = 1.0
    assert replica.told() == AS_BEFORE
    assert not replica.deep.ends_instead()


def test_one_that_never_sleeps_lightly_ends_by_serve_s_delay(tmp_path: Path) -> None:
    entry = ModelConfig(id="m", source="nowhere", light_sleep_after_s=None)
    assert not entry.may_sleep_lightly
    never = DeepSleep(ModelSpec(entry, "nowhere", 0), MemoryPressure(), lambda: TO_ZERO_S)
    sleeper: Any = SimpleNamespace(state=SleepState.AWAKE, is_in_use=False)
    assert never.light_after_s() is None
    assert not never.is_kept(sleeper)
    assert never.report(sleeper) is None


def test_one_that_can_not_fall_asleep_is_no_longer_kept_for_it(replica: Replica) -> None:
    replica.be(SleepState.AWAKE)
    replica.sleeper.num_failures = MAX_FAILURES - 1
    assert replica.told() == STAYS
    replica.sleeper.num_failures = MAX_FAILURES
    assert replica.told() == AS_BEFORE


def test_one_that_would_fall_asleep_while_memory_is_short_ends_instead(replica: Replica) -> None:
    replica.be(SleepState.AWAKE)
    assert not replica.deep.ends_instead()
    replica.used = SHORT_USED
    assert replica.deep.ends_instead()
    assert replica.told() == STAYS, "it may still be used"
    replica.sleeper.ends_instead = True
    assert replica.told() == ENDS


def test_without_a_limit_a_sleeper_ends_only_when_memory_is_short(
    make: Callable[..., Replica],
) -> None:
    replica = make(deep_sleep_after_s=None)
    replica.now_unix_s += 10**9
    assert replica.told() == STAYS
    replica.used = SHORT_USED
    assert replica.told() == ENDS


def test_memory_is_short_until_a_good_part_is_free_again() -> None:
    used = iter((0.0, 0.89, 0.9, 0.86, RELIEVED_USED, 0.84, 0.89, 1.0, 0.0))
    memory = MemoryPressure(lambda: next(used))
    found = [memory.is_short() for _ in range(9)]
    assert found == [False, False, True, True, True, False, False, True, False]


def test_the_memory_that_is_read_is_that_of_the_machine_or_the_container(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 25)
    monkeypatch.setattr(cgroup, "total_bytes", lambda: 100)
    assert cgroup.used_share() == 0.75
    monkeypatch.undo()
    assert 0 < cgroup.used_share() < 1


def test_of_several_sleepers_the_one_that_has_slept_longest_ends_first(
    make: Callable[..., Replica],
) -> None:
    replicas = [make() for _ in range(3)]
    for replica, since_unix_s in zip(replicas, (900.5, 1000.25, 99.0), strict=True):
        replica.sleeper.report = LightSleep(SleepState.ASLEEP, since_unix_s)
        replica.now_unix_s = since_unix_s
        assert replica.told() == STAYS
        replica.used = SHORT_USED
    first, second, oldest = replicas
    assert [each.told() for each in replicas] == [STAYS, STAYS, ENDS]
    oldest.deep.close()
    assert [each.told() for each in (first, second)] == [ENDS, STAYS]
    first.be(SleepState.AWAKE)  # a request came first
    assert [each.told() for each in (first, second)] == [STAYS, ENDS]
    second.used = 0.0
    assert second.told() == STAYS


HOLDING = """
import sys
from pathlib import Path
from deployments.replica.deep_sleep import SleepersLine

line = SleepersLine(lambda: Path(sys.argv[1]))
line.join(1.0)
print("stands", flush=True)
sys.stdin.read()
"""


def test_a_process_that_was_killed_holds_up_nobody(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "stands\n"
        line = SleepersLine(lambda: tmp_path)
        line.join(2.0)
        assert not line.is_first()
        process.kill()
        process.wait()
    assert line.is_first()
    assert len(os.listdir(tmp_path)) == 1
    line.leave()
    assert (line.is_first(), os.listdir(tmp_path)) == (False, [])


@pytest.mark.parametrize(
    ("given", "to_zero_s", "expected"),
    [
        ({}, 300.0, 300.0),
        ({}, 0.0, MIN_AUTO_SLEEP_S),
        ({}, None, None),
        ({"light_sleep_after_s": 7}, 300.0, 7.0),
        ({"light_sleep_after_s": 7}, None, 7.0),
        ({"light_sleep_after_s": None}, 300.0, None),
        ({"task": "embed"}, 300.0, 300.0),
        ({"engine": "vllm"}, 300.0, None),
        ({"device": "cuda"}, 300.0, None),
    ],
)
def test_auto_is_when_serve_would_end_the_process(
    given: dict[str, Any], to_zero_s: float | None, expected: float | None
) -> None:
    entry = ModelConfig(id="m", source="nowhere", **given)
    assert ModelSpec(entry, "nowhere", 0).light_sleep_after_s(to_zero_s) == expected
    assert entry.may_sleep_lightly is (to_zero_s is None or expected is not None)


def test_auto_keeps_no_process_that_would_keep_a_gpu() -> None:
    entry = ModelConfig(id="m", source="nowhere")
    assert ModelSpec(entry, "nowhere", 0.5).light_sleep_after_s(300.0) is None


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"min_replicas": 0, "downscale_to_zero_delay_s": 3}, 3.0),
        ({"min_replicas": 0, "downscale_to_zero_delay_s": 0}, 0.0),
        ({"min_replicas": 0, "downscale_delay_s": 9}, 9.0),
        ({"min_replicas": 1, "downscale_to_zero_delay_s": 3}, None),
        ({"min_replicas": 0, "policy": None}, None),
        (None, None),
    ],
)
def test_a_replica_reads_when_serve_would_end_it(
    monkeypatch: pytest.MonkeyPatch, scaling: dict[str, Any] | None, expected: float | None
) -> None:
    if scaling is None:
        be_replica(monkeypatch, None)
    else:
        policy: Any = {"policy_function": LOAD_POLICY} if "policy" not in scaling else {}
        made = AutoscalingPolicy(**policy)  # type: ignore[no-untyped-call] # Ray leaves it untyped
        be_replica(monkeypatch, AutoscalingConfig(**scaling | {"policy": made}))
    assert to_zero_delay_s() == expected
