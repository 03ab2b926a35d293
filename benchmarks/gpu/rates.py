"""Measures how fast sequences are decoded, by the engine and by `model.generate` in two ways.

All run the same prompts greedily, and prefill is not counted: the engine's steps are timed once all
sequences decode; for `generate`, the time of a run of one new token is subtracted.
"""

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.shapes import BenchmarkModel, stock
from deployments.contract.output import TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.plan.graph_sizes import MAX_GRAPHS
from deployments.plan.memory_budget import MemoryDemand
from deployments.plan.memory_demand import memory_demand
from deployments.plan.model_shape import ModelShape

NUM_WARM_STEPS = 8
"""Decode steps that are not timed, because the first ones are captured."""

MAX_BATCHED_TOKENS = 8192

MAX_THREAD_STEPS = 512
"""Steps of all threads together. Each takes some 20 ms of Python, one after another: more would
take minutes and show the same."""


@dataclass(frozen=True, slots=True)
class Load:
    """A workload.

    Attributes:
        num_seqs: Sequences at once.
        prompt_length: Tokens of each prompt.
        num_tokens: New tokens of each sequence.
    """

    num_seqs: int
    prompt_length: int
    num_tokens: int

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Return prompts of random tokens, without special ones."""
        generator = torch.Generator().manual_seed(self.num_seqs)
        size = (self.num_seqs, self.prompt_length)
        rows: list[list[int]] = torch.randint(2, vocab_size, size, generator=generator).tolist()
        return rows


@dataclass(frozen=True, slots=True)
class EngineRate:
    """The engine's speed of decoding.

    Attributes:
        step_s: Median time of a decode step, including sampling and detokenizing.
        num_captured: Decode steps that were captured.
        mean_length: Tokens that each sequence held, on average over the timed steps.
        planned_bytes: Memory that a replica's plan expects: weights, steps, keys and values.
        peak_bytes: The most that was allocated; on a CPU only weights, keys and values count.
    """

    step_s: float
    num_captured: int
    mean_length: float
    planned_bytes: int
    peak_bytes: int


def engine_rate(loaded: LoadedModel, load: Load, *, cuda_graphs: bool) -> EngineRate:
    """Decode all sequences in one engine."""
    on_gpu = loaded.model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    engine = open_engine(loaded, load, cuda_graphs=cuda_graphs)
    timed = time_steps(engine, load, loaded.text_config.vocab_size)
    held_bytes = loaded.num_weight_bytes + engine.kv_bytes
    return EngineRate(
        timed.step_s,
        timed.num_captured,
        timed.mean_length,
        planned_bytes(loaded, engine.limits) + engine.kv_bytes,
        torch.cuda.max_memory_allocated() if on_gpu else held_bytes,
    )


def open_engine(loaded: LoadedModel, most: Load, *, cuda_graphs: bool) -> Engine:
    """Return an engine for loads up to `most`, warmed up."""
    # Without reads by length, a captured step reads up to a power of two; a shorter length would
    # cut that off.
    max_model_len = 1 << (most.prompt_length + most.num_tokens).bit_length()
    limits = EngineLimits(
        most.num_seqs,
        max_model_len,
        max(MAX_BATCHED_TOKENS, most.num_seqs),
        prefix_caching=False,
        cuda_graphs=cuda_graphs,
    )
    engine = Engine(loaded, limits)
    engine.warm_up()
    return engine


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """Decode steps of a load; see `EngineRate`."""

    step_s: float
    num_captured: int
    mean_length: float


def time_steps(engine: Engine, load: Load, vocab_size: int) -> TimedSteps:
    """Time the steps in which all sequences of a load decode."""
    params = SamplingParams(temperature=0, max_tokens=load.num_tokens, ignore_eos=True)
    for i, prompt in enumerate(load.prompts(vocab_size)):
        engine.add(SequenceRequest(str(i), tuple(prompt), params))
    num_new = dict.fromkeys(map(str, range(load.num_seqs)), 0)
    while min(num_new.values()) == 0:
        step(engine, num_new)
    for _ in range(min(NUM_WARM_STEPS, load.num_tokens // 4)):
        step(engine, num_new)
    first = statistics.mean(num_new.values())
    seconds = []
    while engine.stats.num_running == load.num_seqs:
        seconds.append(step(engine, num_new))
    if not seconds:
        raise ValueError(f"{load} ends before all sequences decode: ask for more new tokens")
    num_captured = engine.num_captured
    while engine.has_work:
        step(engine, num_new)
    # Sequences end in the order of their prefill, so some ended with the last timed step.
    mean_length = load.prompt_length + first + len(seconds) / 2
    return TimedSteps(statistics.median(seconds), num_captured, mean_length)


def planned_bytes(loaded: LoadedModel, limits: EngineLimits) -> int:
    """Return what a replica plans for all but keys and values."""
    return planned_demand(loaded, limits).fixed_bytes


def planned_demand(loaded: LoadedModel, limits: EngineLimits) -> MemoryDemand:
    """Return what a replica plans."""
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    is_captured = limits.cuda_graphs and loaded.model.device.type == "cuda"
    return memory_demand(
        ModelShape.of(loaded.model.config),
        weight_bytes=loaded.num_weight_bytes,
        dtype=dtype,
        step_dtype=dtype,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_batched_tokens=limits.max_batched_tokens,
        max_graphs=MAX_GRAPHS if is_captured else 0,
        on_gpu=loaded.model.device.type == "cuda",
    )


def step(engine: Engine, num_new: dict[str, int] | None = None) -> float:
    """Run a step, which ends when its tokens are on the host; return its seconds.

    Args:
        engine: The engine.
        num_new: The new tokens of each sequence so far; those that were told are added.
    """
    told = list[tuple[str, TextDelta]]()
    engine.deliver = told.extend
    started = time.perf_counter()
    told += engine.step()
    seconds = time.perf_counter() - started
    for name, delta in told:
        if delta.error is not None:
            raise RuntimeError(delta.error)
        if num_new is not None:
            num_new[name] += len(delta.token_ids)
    return seconds


def static_batch_rate(loaded: BenchmarkModel, load: Load) -> float:
    """Return the tokens per second of `generate` on all prompts as one batch."""
    prompts = load.prompts(loaded.text_config.vocab_size)
    with stock(loaded) as model:
        return _decode_rate(load, lambda num: _generate(model, prompts, num))


def threads_rate(loaded: BenchmarkModel, load: Load) -> float:
    """Return the tokens per second of one `generate` per prompt, each in its own thread."""
    num_tokens = max(2, min(load.num_tokens, MAX_THREAD_STEPS // load.num_seqs))
    load = replace(load, num_tokens=num_tokens)
    prompts = load.prompts(loaded.text_config.vocab_size)
    with stock(loaded) as model, ThreadPoolExecutor(load.num_seqs) as threads:

        def run(num_tokens: int) -> None:
            list(threads.map(lambda prompt: _generate(model, [prompt], num_tokens), prompts))

        return _decode_rate(load, run)


def _decode_rate(load: Load, run: Callable[[int], None]) -> float:
    run(2)  # warm
    seconds = []
    for num_tokens in (1, load.num_tokens):
        started = time.perf_counter()
        run(num_tokens)
        seconds.append(time.perf_counter() - started)
    # On a noisy machine, a tiny model's prefill may take as long as the whole run.
    decoding = max(seconds[1] - seconds[0], 1e-9)
    return load.num_seqs * (load.num_tokens - 1) / decoding


@torch.inference_mode()
def _generate(model: Any, prompts: list[list[int]], num_tokens: int) -> None:
    input_ids = torch.tensor(prompts, device=model.device)
    model.generate(
        input_ids=input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
    ).tolist()
