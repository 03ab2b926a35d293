"""Measures how two models take turns on one device, each with a plan for most of it.

Each has a process of its own. The one whose turn ends sleeps lightly: its weights stay in pinned
memory, or on a CPU in a file. So the second one finds the whole device free, as when the models of
`deployments.turns` take light turns.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from operator import eq
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.processes import GIB, TURNS, Child, child
from benchmarks.gpu.rates import MAX_BATCHED_TOKENS, Load, planned_demand, step
from benchmarks.gpu.shapes import TINY, TINY_GEMMA3, Shape, build
from benchmarks.gpu.sleep import answers, held_bytes
from deployments.compute.host_to_device import wait_for
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import CudaDevice
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan import cgroup
from deployments.plan.memory_budget import plan_kv_blocks

SHARE = 0.9
NUM_ROUNDS = 2
MAX_NUM_SEQS, MAX_MODEL_LEN = 32, 32_768
"""So many tokens that keys and values would take more than the share leaves of 80 GB."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that has ended.

    Attributes:
        found_bytes: What was in use on the device before it; on a CPU, by the process.
        awake_bytes: What was in use in it.
        asleep_bytes: What was in use after it.
        wake_s: Seconds to wake.
        token_s: Seconds from the first request to its first token.
        sleep_s: Seconds to fall asleep.
        level: Where the weights are while it sleeps; see `Engine.sleep_level`.
        answers: The new tokens of each sequence.
    """

    found_bytes: int
    awake_bytes: int
    asleep_bytes: int
    wake_s: float
    token_s: float
    sleep_s: float
    level: int | None
    answers: list[tuple[int, ...]]


def swaps(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield a row for each turn: the first of each model starts it, the others wake it."""
    with ExitStack() as stack:
        # The second process starts when the first one sleeps: before that it had no room.
        takers = dict[str, Child]()
        firsts, before = dict[str, Turn](), None
        for number in range(1 + NUM_ROUNDS):
            for name in TURNS:
                if name not in takers:
                    takers[name] = stack.enter_context(child(name, device))
                turn: Turn = takers[name].ask(number)
                first = firsts.setdefault(name, turn)
                equal = sum(map(eq, first.answers, turn.answers))
                swap_s = turn.wake_s + turn.token_s + (before.sleep_s if before else 0.0)
                yield {
                    "turn": number or "first",
                    "model": name,
                    "the other slept in, s": round(before.sleep_s, 2) if before else "-",
                    "woke in, s": round(turn.wake_s, 2) if number else "-",
                    "first token in, s": round(turn.token_s, 3),
                    "swap, s": round(swap_s, 2) if number else "-",
                    "found in use, GiB": round(turn.found_bytes / GIB, 2),
                    "awake, GiB": round(turn.awake_bytes / GIB, 2),
                    "asleep, GiB": round(turn.asleep_bytes / GIB, 2),
                    "level": turn.level,
                    "equal answers": f"{equal} of {len(first.answers)}",
                }
                before = turn


class TurnTaker:
    """One of the models, in its process; asleep between two turns."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Build the model and its engine, which plans for a share of 0.9."""
        self._device = device
        is_tiny = device.type == "cpu"
        if not is_tiny:
            CudaDevice(device.index or 0).enforce_share(SHARE)
        self._load = Load(2, 9, 4) if is_tiny else Load(8, 512, 32)
        loaded = build(_tiny(name) if is_tiny else TURNS[name], device)
        self._prompts = self._load.prompts(loaded.text_config.vocab_size)
        self._engine = _engine(loaded, self._load, device)

    def __call__(self, number: int) -> Turn:
        """Take a turn, and sleep again.

        Raises:
            RuntimeError: The model stays awake, or a sequence has failed.
        """
        engine, device = self._engine, self._device
        found_bytes, started = held_bytes(device), time.perf_counter()
        engine.wake()
        wait_for(device)
        woken = time.perf_counter()
        prompt, params = tuple(self._prompts[0]), SamplingParams(temperature=0, max_tokens=1)
        engine.add(SequenceRequest(f"first-{number}", prompt, params))
        while engine.has_work:
            step(engine)
        told = time.perf_counter()
        tokens = answers(engine, self._prompts, self._load.num_tokens, str(number))
        awake_bytes, ended = held_bytes(device), time.perf_counter()
        # Pinned memory, if a device has its own.
        with patch.object(cgroup, "available_bytes", lambda: 2**60 * (device.type == "cuda")):
            if not engine.sleep():
                raise RuntimeError("it stayed awake; the log says why")
        sleep_s = time.perf_counter() - ended
        return Turn(
            found_bytes,
            awake_bytes,
            held_bytes(device),
            woken - started,
            told - woken,
            sleep_s,
            engine.sleep_level,
            tokens,
        )


def _tiny(name: str) -> Shape:
    """Return a tiny shape for each of the models."""
    return replace(dict(zip(TURNS, (TINY, TINY_GEMMA3), strict=True))[name], name=name)


def _engine(loaded: LoadedModel, load: Load, device: torch.device) -> Engine:
    """Return an engine, warmed up, whose keys and values get what the share leaves."""
    if device.type == "cpu":
        limits = EngineLimits(load.num_seqs, 64, 64, prefix_caching=False)
    else:
        limits = EngineLimits(MAX_NUM_SEQS, MAX_MODEL_LEN, MAX_BATCHED_TOKENS, prefix_caching=False)
        cuda = CudaDevice(device.index or 0)
        kv = plan_kv_blocks(
            total_bytes=cuda.total_bytes,
            share=SHARE,
            demand=planned_demand(loaded, limits),
            max_num_seqs=limits.max_num_seqs,
            foreign_bytes=cuda.foreign_bytes,
        )
        limits = replace(limits, kv_blocks=kv.kv_blocks)
    engine = Engine(loaded, limits)
    engine.warm_up()
    return engine
