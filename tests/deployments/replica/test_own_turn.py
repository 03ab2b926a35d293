"""The lease between processes, and when a replica takes it and gives it up."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deployments.replica.own_turn import OwnTurn, TurnLease
from tests.deadline import until
from tests.failing import failing

pytestmark = pytest.mark.in_time

HOLD = """
import subprocess, sys
from pathlib import Path
from deployments.replica.own_turn import TurnLease
lease = TurnLease(Path(sys.argv[1]))
child = subprocess.Popen(["sleep", "600"], close_fds=False)
print(lease.try_take(), child.pid, flush=True)
for line in sys.stdin:
    lease.free()
    print("free", flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "turns" / "app#card.lock"


@pytest.fixture
def lease(path: Path) -> Iterator[TurnLease]:
    made = TurnLease(path)
    yield made
    made.close()


@contextmanager
def other_holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold the lease, which has a child that inherits what it can."""
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        took, child = process.stdout.readline().split()
        try:
            assert took == "True"
            yield process
        finally:
            process.kill()
            subprocess.run(["kill", child], check=True)


def test_one_process_at_a_time_holds_the_lease(lease: TurnLease, path: Path) -> None:
    with other_holder(path) as other:
        assert not lease.try_take()
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write("free\n")
        other.stdin.flush()
        assert other.stdout.readline() == "free\n"
        assert lease.try_take()
        assert lease.try_take()
    lease.free()
    lease.free()
    assert not lease.is_held


def test_a_killed_process_frees_the_lease_though_its_child_lives(
    lease: TurnLease, path: Path
) -> None:
    with other_holder(path) as other:
        assert not lease.try_take()
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert lease.try_take()


class Group:
    """Two models that take turns, each with a lease of its own on the same file."""

    def __init__(self, path: Path) -> None:
        self.holder: str | None = None
        self.num_reads = 0
        self.leases = {name: TurnLease(path) for name in ("a", "b")}
        self.turns = {
            name: OwnTurn(lease, name, self.read, 0.001) for name, lease in self.leases.items()
        }

    def read(self) -> str | None:
        self.num_reads += 1
        return self.holder

    async def read_often(self) -> None:
        """Wait until whoever waits has looked again."""
        num_reads = self.num_reads
        await until(lambda: self.num_reads >= num_reads + 3)


@pytest.fixture
def group(path: Path) -> Iterator[Group]:
    made = Group(path)
    yield made
    for each in made.leases.values():
        each.close()


async def test_it_is_taken_by_the_model_that_has_the_turn_once_the_last_one_is_done(
    group: Group,
) -> None:
    a, b = group.turns["a"], group.turns["b"]
    group.holder = "a"
    await a.taken()
    waiting = asyncio.ensure_future(b.taken())
    over = asyncio.ensure_future(a.over())
    await group.read_often()
    assert not waiting.done()
    assert not over.done()
    group.holder = "b"
    await over
    await group.read_often()
    assert not waiting.done(), "the other still holds memory"
    a.free()
    await waiting
    assert group.leases["b"].is_held


async def test_nobody_takes_it_before_the_policy_has_said_whose_turn_it_is(group: Group) -> None:
    waiting = asyncio.ensure_future(group.turns["a"].taken())
    await group.read_often()
    assert not waiting.done()
    group.holder = "a"
    await waiting


async def test_a_model_loads_in_the_turn_of_another_that_sleeps(group: Group) -> None:
    group.holder = "a"
    assert group.turns["b"].wait_to_load(failing(AssertionError("nobody waits")))
    assert group.leases["b"].is_held
    await group.turns["b"].over()


async def test_a_model_waits_to_load_until_the_other_is_done(group: Group) -> None:
    group.holder = "a"
    await group.turns["a"].taken()
    asked: list[None] = []

    def is_stopped() -> bool:
        asked.append(None)
        return False

    loading = asyncio.create_task(
        asyncio.to_thread(group.turns["b"].wait_to_load, is_stopped, 0.001)
    )
    await until(lambda: len(asked) >= 3)
    assert not loading.done()
    group.turns["a"].free()
    assert await loading


async def test_a_replica_that_is_stopped_while_it_waits_to_load_does_not_load(
    group: Group,
) -> None:
    group.holder = "a"
    await group.turns["a"].taken()
    assert not group.turns["b"].wait_to_load(lambda: True, 0.001)
    assert not group.leases["b"].is_held


async def test_what_runs_goes_on_while_the_store_is_silent(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    a = group.turns["a"]
    group.holder = "a"
    await a.taken()
    over = asyncio.ensure_future(a.over())
    read = a._read
    a._read = failing(TimeoutError("silent"))
    await until(lambda: "can't be read" in caplog.text)
    assert not over.done()
    a._read = read
    await group.read_often()
    assert not over.done()
    group.holder = "b"
    await over
    assert caplog.text.count("can't be read") == 1


def test_a_model_in_no_group_has_no_turns() -> None:
    assert OwnTurn.of(None) is None
    assert OwnTurn.of("card") is None, "this process is no replica of Serve"
