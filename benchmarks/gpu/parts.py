"""The parts of `benchmarks.gpu.all`: each yields the rows of one table.

Run by itself: python -m benchmarks.gpu.parts PART DEVICE ROWS
"""

import gc
import importlib.util
import json
import logging
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.gpu.equality import Comparison
from benchmarks.gpu.floor import product_rate, prompt_flops, read_bandwidth, step_bytes
from benchmarks.gpu.images import image_prompt, shape_with_images
from benchmarks.gpu.mixed import MixedEngine, busy_loop
from benchmarks.gpu.operators import attention_rows, product_rows
from benchmarks.gpu.processes import moves, neighbours
from benchmarks.gpu.rates import (
    Load,
    open_engine,
    planned_bytes,
    static_batch_rate,
    step,
    threads_rate,
    time_steps,
)
from benchmarks.gpu.shapes import (
    GEMMA3_12B,
    QWEN_7B,
    TINY,
    TINY_GEMMA3,
    TINY_GPT_OSS,
    TINY_LLAMA,
    TINY_QWEN_VL,
    Shape,
    build,
)
from benchmarks.gpu.vllm_rate import vllm_rates
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.attention.varlen_reads import describe_reads, find_obstacle

Row = dict[str, Any]

PROMPT_LENGTH, NUM_TOKENS = 512, 96


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a part runs.

    Attributes:
        device: The device.
    """

    device: torch.device

    @property
    def is_tiny(self) -> bool:
        """Whether shapes and loads are tiny, to check that the part runs."""
        return self.device.type == "cpu"

    def shape(self, shape: Shape) -> Shape:
        """Return the shape, or a tiny one."""
        return TINY if self.is_tiny else shape


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        rows: Yields its rows.
        limit_s: Its seconds, on a GPU.
    """

    rows: Callable[[Machine], Iterator[Row]]
    limit_s: float


def versions(machine: Machine) -> Iterator[Row]:
    """Yield what runs here, and which attention heads of well-known models get."""
    device = machine.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    yield {
        "what": "versions",
        "is": f"{name}; torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
    }
    for what, num_heads, num_kv_heads, head_dim, dtype in (
        ("Qwen2.5-7B", 28, 4, 128, torch.bfloat16),
        ("Gemma 3 12B", 16, 8, 256, torch.bfloat16),
        ("MHA of 64", 12, 12, 64, torch.float16),
        ("float32", 28, 4, 128, torch.float32),
    ):
        config = transformers.Qwen2Config(num_attention_heads=num_heads)
        shape = KVShape((None, 1024), num_kv_heads, head_dim, dtype)
        obstacle = find_obstacle(shape, config, device)
        yield {"what": what, "is": describe_reads(obstacle, attends_in_place=False)}


def gpu_tests(machine: Machine) -> Iterator[Row]:
    """Yield how many of the tests that need a GPU passed, and which did not; see the log."""
    if importlib.util.find_spec("pytest") is None:
        yield {"tests": "pytest is not installed"}
        return
    import pytest

    class Reports:
        """Counts the tests by their outcome, and names those that failed."""

        def __init__(self) -> None:
            self.counts: Counter[str] = Counter()
            self.failed: list[str] = []

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or not report.passed:
                self.counts[report.outcome] += 1
                self.failed += [report.nodeid] if report.failed else []

    options = ["-q", "-m", "gpu", "-p", "no:cacheprovider", "-o", "filterwarnings="]
    folders = ["tests/engine/attention", "tests/engine/replay", "tests/compute/gpu"]
    folders.append("tests/benchmarks/test_gpu.py")
    # In this process, which has imported all packages.
    reports = Reports()
    status = pytest.main([*options, *folders], plugins=[reports])
    counted = ", ".join(f"{number} {outcome}" for outcome, number in reports.counts.items())
    yield {"tests": counted or f"exit status {status}"}
    yield from ({"tests": f"failed: {name}"} for name in reports.failed)


def equality(machine: Machine) -> Iterator[Row]:
    """Yield how many sequences have the tokens of `generate`."""
    for shape in (TINY, TINY_LLAMA, TINY_GEMMA3, TINY_GPT_OSS, TINY_QWEN_VL):
        for dtype in (torch.float32, torch.bfloat16):
            comparison = Comparison(machine.device, dtype, shape)
            for max_batched_tokens, cuda_graphs in ((128, True), (16, False)):
                equal, number = comparison.num_equal(
                    max_batched_tokens=max_batched_tokens, cuda_graphs=cuda_graphs
                )
                yield {
                    "model": shape.name,
                    "dtype": str(dtype).removeprefix("torch."),
                    "tokens of a step": max_batched_tokens,
                    "graphs": "on" if cuda_graphs else "off",
                    "equal to generate": f"{equal} of {number}",
                }


def decode(machine: Machine) -> Iterator[Row]:
    """Yield decode steps of 7B, with graphs and without, beside their floor."""
    yield from _decode(machine, QWEN_7B, (1, 8, 32, 128, 256))


def gemma(machine: Machine) -> Iterator[Row]:
    """Yield decode steps of Gemma 3 12B's text model."""
    yield from _decode(machine, GEMMA3_12B, (1, 32))


def _decode(machine: Machine, shape: Shape, counts: tuple[int, ...]) -> Iterator[Row]:
    bandwidth = read_bandwidth(machine.device)
    loaded = build(machine.shape(shape), machine.device)
    vocab_size = loaded.text_config.vocab_size
    prompt_length, num_tokens = (9, 12) if machine.is_tiny else (PROMPT_LENGTH, NUM_TOKENS)
    loads = [Load(count, prompt_length, num_tokens) for count in counts]
    model, device_name = machine.shape(shape).name, machine.device.type
    for cuda_graphs in (True, False):
        started = time.perf_counter()
        engine = open_engine(loaded, loads[-1], cuda_graphs=cuda_graphs)
        opened = time.perf_counter() - started
        for load in loads if cuda_graphs else loads[:3:2]:
            timed = time_steps(engine, load, vocab_size)
            floor_s = step_bytes(loaded, load.num_seqs, timed.mean_length) / bandwidth
            yield {
                "model": model,
                "sequences": load.num_seqs,
                "graphs": timed.num_captured if cuda_graphs else "off",
                "floor, ms": _ms(floor_s),
                "step, ms": _ms(timed.step_s),
                "times the floor": round(timed.step_s / floor_s, 2),
                "tokens/s": round(load.num_seqs / timed.step_s),
            }
        peak_bytes = torch.cuda.max_memory_allocated() if device_name == "cuda" else 0
        planned = planned_bytes(loaded, engine.limits) + engine.kv_bytes
        yield {
            "model": model,
            "graphs": engine.captured or "none at the start",
            "note": f"{engine.attention}, {engine.forward}; ready in {opened:.1f} s; at most "
            f"{peak_bytes / 2**30:.2f} GiB allocated of {planned / 2**30:.2f} planned",
        }
        del engine
        gc.collect()


def kernels(machine: Machine) -> Iterator[Row]:
    """Yield the kernels of a decode step of 7B, by their time."""
    loaded = build(machine.shape(QWEN_7B), machine.device)
    if machine.is_tiny:
        return
    from torch.profiler import ProfilerActivity, profile

    for count in (32, 256, 1):
        mixed = MixedEngine(loaded, count, PROMPT_LENGTH)
        mixed.seconds(0, 0)
        num_steps = 4
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(num_steps):
                step(mixed.engine)
        events = sorted(
            (event for event in profiled.key_averages() if event.device_time_total),
            key=lambda event: event.device_time_total,
            reverse=True,
        )
        total_us = sum(event.device_time_total for event in events) / num_steps
        launches = sum(event.count for event in events) / num_steps
        yield {
            "sequences": count,
            "kernel": "all",
            "launches": round(launches),
            "us a step": round(total_us),
        }
        for event in events[:12]:
            yield {
                "sequences": count,
                "kernel": event.key.replace("|", "/")[:110],
                "launches": round(event.count / num_steps, 1),
                "us a step": round(event.device_time_total / num_steps),
            }


def operators(machine: Machine) -> Iterator[Row]:
    """Yield our attention and our products of decode steps beside torch's."""
    if machine.is_tiny:
        return  # Triton's kernels need a GPU
    bandwidth = read_bandwidth(machine.device)
    for rows in (attention_rows, product_rows):
        yield from rows(machine.device, bandwidth)


def mixed(machine: Machine) -> Iterator[Row]:
    """Yield steps of 7B that prefill prompts while sequences decode."""
    loaded = build(machine.shape(QWEN_7B), machine.device)
    rate = product_rate(machine.device, loaded.model.dtype)
    cases: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = (
        (1, ((1, 512), (1, 2048), (4, 2048))),
        (32, ((1, 100), (1, 512), (4, 512))),
        (256, ((8, 224),)),
    )
    if machine.is_tiny:
        cases = ((2, ((1, 9), (2, 16))),)
    for num_decode, prompts in cases:
        engine = MixedEngine(loaded, num_decode, 16 if machine.is_tiny else PROMPT_LENGTH, prompts)
        alone_s = engine.seconds(0, 0)
        for number, length in prompts:
            seconds = engine.seconds(number, length)
            stop = threading.Event()
            busy = threading.Thread(target=busy_loop, args=(stop,))
            busy.start()
            try:
                contended_s = engine.seconds(number, length)
            finally:
                stop.set()
                busy.join()
            prompts_s = number * prompt_flops(loaded, length) / rate
            yield {
                "decode rows": num_decode,
                "prompts": f"{number} x {length}",
                "decode step, ms": _ms(alone_s),
                "prompts by products' rate, ms": _ms(prompts_s),
                "mixed step, ms": _ms(seconds),
                "times both": round(seconds / (alone_s + prompts_s), 2),
                "prompt tokens/s": round(number * length / max(seconds - alone_s, 1e-9)),
                "with a busy thread, ms": _ms(contended_s),
            }
        del engine
        gc.collect()


def classification(machine: Machine) -> Iterator[Row]:
    """Yield texts a second of RoBERTa-large's shape."""
    # Imported here: poolers need packages that a machine with torch and transformers may lack.
    from benchmarks.gpu.classifier import texts_per_second

    sizes = (64,) if machine.is_tiny else (2048, 8192, 16_384)
    for num_tokens in sizes:
        length = 16 if machine.is_tiny else 256
        rate, layout = texts_per_second(machine.device, num_tokens, length, is_tiny=machine.is_tiny)
        yield {
            "tokens of a batch": num_tokens,
            "tokens of a text": length,
            "layout": layout,
            "texts/s": round(rate, 1),
            "tokens/s": round(rate * length),
        }


def images(machine: Machine) -> Iterator[Row]:
    """Yield a prompt with an image, with Gemma 3 12B's shape."""
    shape = shape_with_images(is_tiny=machine.is_tiny)
    loaded = build(shape, machine.device)
    for num_text_tokens in (12,) if machine.is_tiny else (200, 4000):
        yield image_prompt(loaded, shape, num_text_tokens)
        gc.collect()


def shares(machine: Machine) -> Iterator[Row]:
    """Yield what two processes with shares of 0.4 do to each other."""
    yield from neighbours(machine.device)


def moved_answers(machine: Machine) -> Iterator[Row]:
    """Yield how many answers stay the same when they move between two processes."""
    yield from moves(machine.device)


def sleep(machine: Machine) -> Iterator[Row]:
    """Yield what a light sleep of 7B gives back and costs."""
    # Imported here: it needs psutil, which a machine with torch and transformers may lack.
    from benchmarks.gpu.sleep import light_sleeps

    loaded = build(machine.shape(QWEN_7B), machine.device)
    load = Load(2, 9, 4) if machine.is_tiny else Load(8, PROMPT_LENGTH, 32)
    yield from light_sleeps(loaded, load)


def turns(machine: Machine) -> Iterator[Row]:
    """Yield what it takes two models that fill the device by turns to swap."""
    # Imported here, as `sleep` is.
    from benchmarks.gpu.turns import swaps

    yield from swaps(machine.device)


def vllm(machine: Machine) -> Iterator[Row]:
    """Yield what vLLM reaches with 7B, where it is installed."""
    if machine.is_tiny:
        return
    counts = (1, 32, 256)
    yield from vllm_rates(QWEN_7B, [Load(count, PROMPT_LENGTH, NUM_TOKENS) for count in counts])


def baselines(machine: Machine) -> Iterator[Row]:
    """Yield what `generate` reaches with 7B."""
    loaded = build(machine.shape(QWEN_7B), machine.device)
    prompt_length, num_tokens = (9, 8) if machine.is_tiny else (PROMPT_LENGTH, 48)
    for count in (1, 2) if machine.is_tiny else (1, 32, 256):
        load = Load(count, prompt_length, num_tokens)
        row: Row = {
            "sequences": count,
            "one batch, tokens/s": round(static_batch_rate(loaded, load)),
        }
        if count <= 32:
            row["threads, tokens/s"] = round(threads_rate(loaded, load))
        yield row


PARTS: Mapping[str, Part] = {
    "versions": Part(versions, 20),
    "decode": Part(decode, 60),
    "kernels": Part(kernels, 30),
    "operators": Part(operators, 25),
    "mixed": Part(mixed, 50),
    "gpu_tests": Part(gpu_tests, 45),
    "equality": Part(equality, 65),
    "gemma": Part(gemma, 35),
    "images": Part(images, 30),
    "shares": Part(shares, 25),
    "moved_answers": Part(moved_answers, 25),
    "classification": Part(classification, 20),
    "sleep": Part(sleep, 40),
    "turns": Part(turns, 45),
    "baselines": Part(baselines, 25),
    "vllm": Part(vllm, 120),
}


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 2)


def main(name: str, device: str, rows: str) -> None:
    """Run one part; write each row as soon as it is known."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    machine = Machine(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"))
    if machine.is_tiny:
        torch.set_num_threads(1)
    with Path(rows).open("w", encoding="utf-8") as file:
        for row in PARTS[name].rows(machine):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
