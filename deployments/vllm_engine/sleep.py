"""The light sleep of a vLLM engine, by vLLM's level 1: weights lie in the host's memory meanwhile.

Level 2 would read them again by vLLM's reload, which has to fit each quantization and adapter.
Needs no vLLM.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

import ray
from ray.util import get_current_placement_group, placement_group_table

from deployments.contract.errors import RaystreamError, ReplicaUnavailableError
from deployments.contract.model_spec import ModelSpec
from deployments.contract.unsupported_model import reason_of
from deployments.plan import cgroup
from deployments.plan.memory_budget import GIB
from deployments.plan.sleep_memory import VLLM_HOST_PART
from deployments.vllm_engine.watches import LOOK_S, MOST_S, Looks

logger = logging.getLogger("ray.serve.raystream.replica")

LEVEL: Final = 1
"""vLLM's level that copies the weights into the host's memory."""

COPIED_PER_S: Final = 2**29
"""Bytes of weights a second that every sleep and every wake moves; the first sleep also pins memory
for them, which is slower than the copy.
"""


class SleepingLlm(Protocol):
    """What is asked of vLLM's AsyncLLM."""

    async def sleep(self, level: int) -> None:
        """Give the device's memory back."""
        ...

    async def wake_up(self) -> None:
        """Take it again."""
        ...

    async def is_sleeping(self) -> bool:
        """Return whether it is given back."""
        ...


class EngineSleep:
    """Whether one engine sleeps; without sequences, which its owner sees to."""

    def __init__(
        self,
        model_id: str,
        llm: SleepingLlm,
        weight_bytes: int,
        require_alive: Callable[[], None],
        part_here: float = 1.0,
    ) -> None:
        """Start with an engine that is awake.

        Args:
            model_id: The model's id, for the log.
            llm: The engine.
            weight_bytes: The model's weights.
            require_alive: Raises if the engine has ended.
            part_here: The part of the weights that this node's devices hold.
        """
        self._model_id = model_id
        self._llm = llm
        self._weight_bytes = weight_bytes
        self._require_alive = require_alive
        self._part_here = part_here
        self._has_slept = False
        self.is_awake = True
        """Whether it is awake, and neither falls asleep nor wakes."""
        self.failure: str | None = None
        """Why the engine can't be used any more; None unless a sleep or a wake has failed."""

    @property
    def level(self) -> int | None:
        """1, by vLLM's numbers: in pinned memory of the host; None before the first sleep."""
        return LEVEL if self._has_slept else None

    async def fall_asleep(self) -> bool:
        """Copy the weights into the host's memory, and give the devices' back until `wake`.

        Returns:
            Whether it sleeps: not if the host has no room for the weights.

        Raises:
            RaystreamError: The engine has ended, or this has failed.
        """
        if not self._has_room():
            return False
        self.is_awake = False  # before anything is awaited: no probe gets into it
        await self._change(self._llm.sleep(LEVEL), "put to sleep")
        self._has_slept = True
        return True

    async def wake(self) -> None:
        """Copy the weights back to the devices.

        Raises:
            RaystreamError: The engine has ended, or this has failed.
        """
        await self._change(self._wake_up(), "woken")
        self.is_awake = True

    async def _wake_up(self) -> None:
        await self._llm.wake_up()
        if await self._llm.is_sleeping():
            raise RuntimeError("vLLM sleeps on")

    def _has_room(self) -> bool:
        """Return whether the host has room for the weights of this node's devices.

        torch keeps the pinned blocks, so there is room for every sleep after the first.
        """
        needed_bytes = int(VLLM_HOST_PART * self._part_here * self._weight_bytes)
        free_bytes = cgroup.available_bytes()
        if self._has_slept or free_bytes >= needed_bytes:
            return True
        logger.warning(
            "%s stays awake: its weights may take %.2f GiB of the host's memory, of which %.2f GiB "
            "are free",
            self._model_id,
            needed_bytes / GIB,
            free_bytes / GIB,
        )
        return False

    async def _change(self, changing: Coroutine[Any, Any, None], what: str) -> None:
        """Wait for a sleep or a wake, of which no step tells; if it fails, the engine has failed.

        Args:
            changing: Asks vLLM for it.
            what: What is done to the model, for errors.

        Raises:
            RaystreamError: It has failed or hangs, or the engine has ended.
        """
        change = asyncio.ensure_future(changing)
        looks, left_s = Looks(), MOST_S + self._weight_bytes / COPIED_PER_S
        try:
            while not change.done():
                await asyncio.wait({change}, timeout=LOOK_S)
                left_s -= looks.passed_s()
                self._require_alive()
                if left_s <= 0 and not change.done():
                    raise TimeoutError("vLLM does not answer")
            change.result()
        except RaystreamError:
            raise
        except Exception as error:
            self._require_alive()  # what an engine that has ended raises is no failure of this
            self.failure = f"The model could not be {what}: {reason_of(error)}"
            raise ReplicaUnavailableError(self.failure) from error
        finally:
            if not change.done():
                change.cancel()


def part_on_this_node(spec: ModelSpec) -> float:
    """Return the part of a model's weights that devices of this node hold.

    vLLM starts all workers on the replica's node; Ray starts them where their bundles are.
    """
    group = get_current_placement_group() if spec.entry.engine_args.uses_ray else None
    if group is None:
        return 1.0
    nodes = [*placement_group_table(group)["bundles_to_node_id"].values()]
    return nodes.count(ray.get_runtime_context().get_node_id()) / len(nodes)
