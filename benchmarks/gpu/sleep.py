"""Measures a light sleep: what it gives back, what it costs, and whether answers stay the same."""

import gc
import time
from collections.abc import Iterator
from operator import eq
from typing import Any
from unittest.mock import patch

import psutil
import torch

from benchmarks.gpu.rates import Load, open_engine
from deployments.compute.host_to_device import wait_for
from deployments.contract.output import TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan import cgroup

NUM_SLEEPS = {1: 2, 2: 1}
"""Sleeps by level. The first one copies the weights, which takes longest to a disk."""


def light_sleeps(loaded: LoadedModel, load: Load) -> Iterator[dict[str, Any]]:
    """Yield a row for each sleep: with the weights in pinned memory (1), and in a file (2).

    Args:
        loaded: The model; on a CPU it sleeps only with its weights in a file.
        load: What is answered before each sleep and after it.
    """
    device = loaded.model.device
    for level in (1, 2) if device.type == "cuda" else (2,):
        engine = open_engine(loaded, load, cuda_graphs=True)
        prompts = load.prompts(loaded.text_config.vocab_size)
        expected = answers(engine, prompts, load.num_tokens, "awake")
        with patch.object(cgroup, "available_bytes", lambda level=level: 2**60 * (level == 1)):
            for number in range(1, 1 + NUM_SLEEPS[level]):
                awake_bytes, started = held_bytes(device), time.perf_counter()
                if not engine.sleep():
                    yield {"level": level, "sleep": "it stayed awake; the log says why"}
                    break
                slept, asleep_bytes = time.perf_counter(), held_bytes(device)
                woken = time.perf_counter()
                engine.wake()
                wait_for(device)
                woke_s = time.perf_counter() - woken
                found = answers(engine, prompts, load.num_tokens, f"{level}-{number}")
                yield {
                    "level": engine.sleep_level,
                    "sleep": number,
                    "fell asleep in, s": round(slept - started, 2),
                    "awake, GiB": round(awake_bytes / 2**30, 2),
                    "asleep, GiB": round(asleep_bytes / 2**30, 2),
                    "woke in, s": round(woke_s, 2),
                    "of it graphs": engine.captured or "none",
                    "equal answers": f"{sum(map(eq, expected, found))} of {len(expected)}",
                }
        del engine
        gc.collect()


def held_bytes(device: torch.device) -> int:
    """Return the memory that is in use on a GPU; on a CPU, by this process."""
    if device.type != "cuda":
        return int(psutil.Process().memory_info().rss)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes - free_bytes


def answers(
    engine: Engine, prompts: list[list[int]], num_tokens: int, run: str
) -> list[tuple[int, ...]]:
    """Return the new tokens of each sequence.

    Raises:
        RuntimeError: A sequence has failed.
    """
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    names = [f"{run}-{at}" for at in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        engine.add(SequenceRequest(name, tuple(prompt), params))
    told = list[tuple[str, TextDelta]]()
    engine.deliver = told.extend
    while engine.has_work:
        told += engine.step()
    tokens: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())
    for name, delta in told:
        if delta.error is not None:
            raise RuntimeError(delta.error)
        tokens[name] += delta.token_ids
    return [tokens[name] for name in names]
