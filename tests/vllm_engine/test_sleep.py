import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.plan import cgroup
from deployments.plan.memory_budget import GIB
from deployments.plan.sleep_memory import VLLM_HOST_PART
from deployments.vllm_engine import sleep
from deployments.vllm_engine.sleep import EngineSleep, part_on_this_node

WEIGHT_BYTES = 4 * GIB
NEEDED_BYTES = int(VLLM_HOST_PART * WEIGHT_BYTES)


class Llm:
    """An engine of vLLM's, which sleeps and wakes as it is told."""

    def __init__(self) -> None:
        self.sleeps = False
        self.error: Exception | None = None
        self.hangs = False
        self.stays_asleep = False

    async def sleep(self, level: int) -> None:
        assert level == 1
        await self._answer()
        self.sleeps = True

    async def wake_up(self) -> None:
        await self._answer()
        self.sleeps = self.stays_asleep

    async def is_sleeping(self) -> bool:
        return self.sleeps

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error


class Owner:
    """An engine of ours, which may have ended."""

    def __init__(self) -> None:
        self.has_ended = False

    def require_alive(self) -> None:
        if self.has_ended:
            raise ReplicaUnavailableError("the engine has ended")


@pytest.fixture
def llm() -> Llm:
    return Llm()


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> Owner:
    monkeypatch.setattr(cgroup, "available_bytes", lambda: NEEDED_BYTES)
    monkeypatch.setattr(sleep, "LOOK_S", 0.01)
    monkeypatch.setattr(sleep, "MOST_S", 0.0)
    monkeypatch.setattr(sleep, "COPIED_PER_S", 2**40)
    return Owner()


def sleep_of(llm: Llm, owner: Owner, part_here: float = 1.0) -> EngineSleep:
    return EngineSleep("m", llm, WEIGHT_BYTES, owner.require_alive, part_here)


async def test_an_engine_falls_asleep_and_wakes(llm: Llm, owner: Owner) -> None:
    slept = sleep_of(llm, owner)
    assert (slept.is_awake, slept.level) == (True, None)
    assert await slept.fall_asleep()
    assert (slept.is_awake, slept.level, llm.sleeps) == (False, 1, True)
    await slept.wake()
    assert (slept.is_awake, slept.level, llm.sleeps) == (True, 1, False)


@pytest.mark.parametrize(
    ("part_here", "free_bytes", "sleeps"),
    [
        (1.0, NEEDED_BYTES, True),
        (1.0, NEEDED_BYTES - 1, False),
        (0.25, NEEDED_BYTES // 4, True),
        (0.25, NEEDED_BYTES // 4 - 1, False),
        (0.0, 0, True),
    ],
)
async def test_the_host_must_have_room_for_what_its_own_devices_hold(
    llm: Llm,
    owner: Owner,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part_here: float,
    free_bytes: int,
    *,
    sleeps: bool,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(cgroup, "available_bytes", lambda: free_bytes)
    slept = sleep_of(llm, owner, part_here)
    assert await slept.fall_asleep() is sleeps
    assert slept.is_awake is not sleeps
    assert ("m stays awake: its weights may take" in caplog.text) is not sleeps


async def test_memory_that_is_pinned_once_needs_no_room_again(
    llm: Llm, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept = sleep_of(llm, owner)
    assert await slept.fall_asleep()
    await slept.wake()
    monkeypatch.setattr(cgroup, "available_bytes", lambda: 0)
    assert await slept.fall_asleep()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"error": RuntimeError("CUDA out of memory")}, "CUDA out of memory"),
        ({"hangs": True}, "vLLM does not answer"),
    ],
)
async def test_a_sleep_that_fails_or_hangs_is_a_failure_of_the_engine(
    llm: Llm, owner: Owner, fault: dict[str, Any], why: str
) -> None:
    vars(llm).update(fault)
    slept = sleep_of(llm, owner)
    with pytest.raises(ReplicaUnavailableError, match=f"could not be put to sleep: {why}"):
        await slept.fall_asleep()
    assert slept.failure == f"The model could not be put to sleep: {why}"
    assert not slept.is_awake


async def test_an_engine_that_sleeps_on_has_failed(llm: Llm, owner: Owner) -> None:
    slept = sleep_of(llm, owner)
    assert await slept.fall_asleep()
    llm.stays_asleep = True
    with pytest.raises(ReplicaUnavailableError, match="could not be woken: vLLM sleeps on"):
        await slept.wake()
    assert slept.failure is not None


@pytest.mark.parametrize("hangs", [False, True])
async def test_the_end_of_an_engine_is_no_failure_of_its_sleep(
    llm: Llm, owner: Owner, *, hangs: bool
) -> None:
    llm.hangs, llm.error = hangs, RuntimeError("the engine core is dead")
    slept = sleep_of(llm, owner)
    falling = asyncio.ensure_future(slept.fall_asleep())
    owner.has_ended = True
    with pytest.raises(ReplicaUnavailableError, match="the engine has ended"):
        await falling
    assert slept.failure is None


def test_a_node_holds_the_parts_of_the_workers_that_ray_has_put_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spec(**args: Any) -> ModelSpec:
        entry = {"id": "m", "source": "m", "engine": "vllm", "engine_args": args}
        return ModelSpec(ModelConfig.model_validate(entry), "m", num_gpus=4)

    nodes = {0: "here", 1: "here", 2: "here", 3: "there"}
    monkeypatch.setattr(sleep, "get_current_placement_group", lambda: "group")
    monkeypatch.setattr(sleep, "placement_group_table", lambda group: {"bundles_to_node_id": nodes})
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    ray_workers = spec(tensor_parallel_size=4, distributed_executor_backend="ray")
    assert part_on_this_node(ray_workers) == 0.75
    assert part_on_this_node(spec(tensor_parallel_size=4)) == 1
