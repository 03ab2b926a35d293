"""Compares steps on weights of 8 and 4 bits with the same steps in bfloat16.

1. The products of two layers of a block by the kernels alone, as a program of a step calls them.
2. With --steps, an engine's steps in the shape of Qwen2-0.5B with random weights: decode steps of
   some sequences, and the prefill of a prompt.

Rounds alternate, so that all meet the same conditions; a ratio is the median of bfloat16's time
divided by the other's in the same round. Without AVX512_BF16, weights are float32 instead.

Run: python -m benchmarks.quantized_weights
     python -m benchmarks.quantized_weights --threads 2 --steps 12
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_shapes import SHAPES, chosen_dtype, load_shape
from benchmarks.engine import add_all
from benchmarks.pairs import compared
from deployments.compute.cpu.linear.prepacked_linear import PrepackedLinear
from deployments.compute.cpu.linear.quantized_linear import Int4Linear, Int8Linear
from deployments.compute.cpu.linear.small_batch_kernel import make_kernel
from deployments.compute.cpu.linear.small_batch_linear import SmallBatchLinear, _on_integers
from deployments.compute.host_memory import keep_freed_memory
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel

SHAPE = "Qwen2-0.5B"
WEIGHTS = ("plain", "int8", "int4")
PREFILLED_TOKENS = 512


def main() -> None:
    """Measure and print a table or two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,8,32,512", help="rows of a batch, a list")
    parser.add_argument("--sequences", default="1,8,32", help="sequences of a step, a list")
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--rounds", type=int, default=31, help="rounds of products")
    parser.add_argument("--steps", type=int, default=0, help="rounds of steps")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    console = Console()
    rows = [int(count) for count in options.rows.split(",")]
    with torch.inference_mode():
        console.print(compare_products(rows, options.rounds))
    if options.steps:
        counts = [int(count) for count in options.sequences.split(",")]
        console.print(compare_steps(counts, options.steps))


def new_table(title: str, first: str) -> Table:
    """Return an empty table, in milliseconds and ratios to plain weights."""
    dtype = str(chosen_dtype()).removeprefix("torch.")
    table = Table(title=f"{title}, {torch.get_num_threads()} thread(s), ms")
    for column in (first, dtype, "int8", "ratio", "int4", "ratio"):
        table.add_column(column, justify="right")
    return table


def add_row(table: Table, name: str, runs: Mapping[str, Callable[[], float]], rounds: int) -> None:
    """Run all weights by turns, and add a row of their seconds.

    Args:
        table: The table.
        name: The row's name.
        runs: By the weights, what takes a measurement in seconds.
        rounds: How often each is measured.
    """
    seconds = [{weights: run() for weights, run in runs.items()} for _ in range(rounds)]
    cells = []
    for weights in WEIGHTS[1:]:
        plain, quantized, ratio = compared((each["plain"], each[weights]) for each in seconds)
        cells += [f"{1e3 * quantized:.2f}", f"{ratio:.2f}"]
    table.add_row(name, f"{1e3 * plain:.2f}", *cells)


def compare_products(counts: Sequence[int], rounds: int) -> Table:
    """Return a table of the products of the two largest layers of a block."""
    config = SHAPES[SHAPE]()
    narrow, wide = config.hidden_size, config.intermediate_size
    table = new_table(f"{narrow} -> {wide} -> {narrow}", "rows")
    layers = [layers_of(wide, narrow), layers_of(narrow, wide)]
    for count in counts:
        batches = [torch.randn(count, each).to(chosen_dtype()) for each in (narrow, wide)]
        runs = {
            weights: partial(seconds_of, [each[weights] for each in layers], batches)
            for weights in WEIGHTS
        }
        add_row(table, str(count), runs, rounds)
    return table


def layers_of(outputs: int, inputs: int) -> Mapping[str, SmallBatchLinear]:
    """Return the same layer on all weights."""
    weight = torch.randn(outputs, inputs).to(chosen_dtype())
    kernel = make_kernel(is_bfloat16=weight.dtype is torch.bfloat16)
    assert kernel is not None, "this processor has no kernel for such weights"
    found = {"plain": SmallBatchLinear(kernel, PrepackedLinear(weight, None).packed, None)}
    for name, kind in (("int8", Int8Linear), ("int4", Int4Linear)):
        layer = kind(weight, None)
        held = layer._integers, layer._scales, layer._bias
        found[name] = _on_integers(*held, layer.weight_bits)
    return found


def seconds_of(layers: Sequence[torch.nn.Module], batches: Sequence[torch.Tensor]) -> float:
    """Return the seconds of a product of each layer with its batch."""
    started = time.perf_counter()
    for layer, batch in zip(layers, batches, strict=True):
        layer(batch)
    return time.perf_counter() - started


def compare_steps(counts: Sequence[int], rounds: int) -> Table:
    """Return a table of decode steps, and of the prefill of a prompt."""
    models = {
        weights: load_shape(SHAPE, chosen_dtype(), None if weights == "plain" else weights)
        for weights in WEIGHTS
    }
    table = new_table(f"a step in {SHAPE}'s shape", "step")
    for count in counts:
        engines = {weights: decoding(model, count, rounds) for weights, model in models.items()}
        runs = {weights: partial(step_s, engine) for weights, engine in engines.items()}
        add_row(table, f"decode, {count}", runs, rounds)
    engines = {weights: engine_of(model, 1) for weights, model in models.items()}
    runs = {weights: partial(prefill_s, engine) for weights, engine in engines.items()}
    add_row(table, f"prefill of {PREFILLED_TOKENS}", runs, max(3, rounds // 4))
    return table


def engine_of(model: LoadedModel, num_sequences: int) -> Engine:
    """Return an engine that is warm."""
    limits = EngineLimits(num_sequences, 1024, PREFILLED_TOKENS, prefix_caching=False)
    engine = Engine(model, limits)
    engine.warm_up()
    return engine


def decoding(model: LoadedModel, num_sequences: int, num_steps: int) -> Engine:
    """Return an engine whose sequences have been prefilled."""
    engine = engine_of(model, num_sequences)
    prompts = [tuple(range(i, i + 64)) for i in range(num_sequences)]
    add_all(engine, prompts, num_steps + 8)
    while len(engine.step()) < num_sequences:
        pass
    for _ in range(2):  # the step is captured
        engine.step()
    return engine


def step_s(engine: Engine) -> float:
    """Return the seconds of a step."""
    started = time.perf_counter()
    engine.step()
    return time.perf_counter() - started


def prefill_s(engine: Engine) -> float:
    """Return the seconds until a prompt has its first token, which is the last."""
    add_all(engine, [tuple(range(PREFILLED_TOKENS))], 1)
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
