"""Measures the engine on a GPU and writes one table.

Run: python -m benchmarks.gpu TABLE.md

Without a GPU it says so where the table would be. `--device cpu` runs everything on tiny shapes, to
see that it runs; its figures say nothing about a GPU.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from rich.console import Console

from benchmarks.gpu.equality import num_equal
from benchmarks.gpu.floor import read_bandwidth, step_bytes
from benchmarks.gpu.rates import Load, engine_rate, static_batch_rate, threads_rate
from benchmarks.gpu.report import NOT_MEASURED, Report, Row
from benchmarks.gpu.shapes import QWEN_05B, QWEN_7B, TINY, BenchmarkModel, Shape, build
from deployments.engine.device_errors import is_out_of_memory, release_cache

MAX_THREADS = 32
"""More threads than that only wait for each other, and for minutes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", type=Path, help="the markdown file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a minute or so")
    parser.add_argument("--sequences", default="1,8,32,128,256", help="at once, a list")
    parser.add_argument("--prompt-length", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--num-tokens", type=int, default=128, help="new tokens of each sequence")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        report = Report("The engine on a GPU", (NOT_MEASURED,), ())
        Console().print(NOT_MEASURED)
    else:
        report = measure(args)
        Console().print(report.table)
    args.table.write_text(report.markdown, encoding="utf-8")


def measure(args: argparse.Namespace) -> Report:
    """Run everything on the device that was named."""
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    counts = [int(count) for count in args.sequences.split(",")]
    num_tokens, shapes = args.num_tokens, [QWEN_05B, QWEN_7B]
    if args.quick:
        counts, num_tokens, shapes = counts[:2], min(num_tokens, 32), [QWEN_05B]
    if device.type == "cpu":
        shapes = [TINY]
        torch.set_num_threads(1)  # the threads of `generate` would wait for each other's
    bandwidth = read_bandwidth(device)
    equal, checked = num_equal(device)
    loads = [Load(count, args.prompt_length, num_tokens) for count in counts]
    rows = [row for shape in shapes for row in _rows(shape, loads, device, bandwidth)]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, tiny shapes"
    notes = (
        f"torch {torch.__version__}, transformers {transformers.__version__}, random weights in "
        f"{', '.join(sorted({str(shape.dtype).removeprefix('torch.') for shape in shapes}))}; "
        f"prompts of {args.prompt_length} tokens, {num_tokens} new ones, greedy, prefill left out",
        f"floor: weights, keys and values at the measured {bandwidth / 1e9:,.0f} GB/s",
        f"greedy tokens of a small model in float32: {equal} of {checked} sequences as generate's",
    )
    return Report(f"The engine on {name}", notes, tuple(rows))


def _rows(
    shape: Shape, loads: Sequence[Load], device: torch.device, bandwidth: float
) -> Iterator[Row]:
    loaded = build(shape, device)
    for load in loads:
        trouble = ""
        try:
            yield _row(shape, loaded, load, bandwidth)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            trouble = "out of memory"
        # Only here has the traceback let go of what the run held.
        if trouble:
            yield Row(shape.name, load.num_seqs, trouble=trouble)
        release_cache(device)


def _row(shape: Shape, loaded: BenchmarkModel, load: Load, bandwidth: float) -> Row:
    graphs = engine_rate(loaded, load, cuda_graphs=True)
    plain = engine_rate(loaded, load, cuda_graphs=False)
    in_threads = load.num_seqs <= MAX_THREADS
    return Row(
        model=shape.name,
        num_seqs=load.num_seqs,
        floor_s=step_bytes(loaded, load.num_seqs, graphs.mean_length) / bandwidth,
        step_s=graphs.step_s,
        plain_step_s=plain.step_s,
        num_graphs=graphs.num_graphs,
        static_rate=static_batch_rate(loaded, load),
        threads_rate=threads_rate(loaded, load) if in_threads else None,
    )


if __name__ == "__main__":
    main()
