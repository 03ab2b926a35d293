"""Measures the engine on a GPU and writes one table.

Run: python -m benchmarks.gpu TABLE.md

The table is rewritten after each row, so a run that is stopped early keeps its rows. A part that
fails (out of memory, say) leaves a gap, and a line that gives the reason.

Without a GPU, the file says so instead of holding a table. `--device cpu` runs everything on tiny
shapes, to check that it runs; its figures say nothing about a GPU.
"""

import argparse
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import transformers
from rich.console import Console

from benchmarks.gpu.attempts import Attempts
from benchmarks.gpu.equality import num_equal
from benchmarks.gpu.floor import read_bandwidth, step_bytes
from benchmarks.gpu.rates import Load, engine_rate, static_batch_rate, threads_rate
from benchmarks.gpu.report import NOT_MEASURED, Report, Row
from benchmarks.gpu.shapes import QWEN_05B, QWEN_7B, TINY, BenchmarkModel, Shape, build

logger = logging.getLogger(__name__)

MAX_THREADS = 32
"""More threads only wait for each other, for minutes."""

TRANSFORMERS = (5, 23)
"""The version that the project is written for; others describe their caches differently."""

Publish = Callable[[Report], None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, rewrite the table after each row, and print it."""
    args = _parse(arguments)

    def publish(report: Report) -> None:
        args.table.write_text(report.markdown, encoding="utf-8")

    console = Console()
    if args.device == "cuda" and not torch.cuda.is_available():
        publish(Report("The engine on a GPU", (NOT_MEASURED,), ()))
        console.print(NOT_MEASURED)
        return
    report = measure(args, publish)
    if console.is_terminal:
        console.print(report.table)
    else:  # a table would be squeezed into 80 columns
        console.print(report.markdown, markup=False, highlight=False, soft_wrap=True)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("table", type=Path, help="the markdown file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a smoke run of a minute or so")
    parser.add_argument(
        "--sequences", default="1,8,32,128,256", help="numbers of sequences, a list"
    )
    parser.add_argument("--prompt-length", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--num-tokens", type=int, default=128, help="new tokens of each sequence")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="start no new part after this time"
    )
    if tuple(map(int, transformers.__version__.split(".")[:2])) != TRANSFORMERS:
        major, minor = TRANSFORMERS
        parser.error(
            f"the engine needs transformers {major}.{minor}, not {transformers.__version__}: "
            f'pip install "transformers=={major}.{minor}.*"'
        )
    return parser.parse_args(arguments)


def measure(args: argparse.Namespace, publish: Publish) -> Report:
    """Measure everything on the chosen device; publish the report after each row."""
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu")
    counts = [int(count) for count in args.sequences.split(",")]
    num_tokens, shapes = args.num_tokens, [QWEN_05B, QWEN_7B]
    if args.quick:
        counts, num_tokens, shapes = counts[:2], min(num_tokens, 32), [QWEN_05B]
    if device.type == "cpu":
        shapes = [TINY]
        torch.set_num_threads(1)  # more would make the threads of `generate` wait for each other
    title = _title(device)
    publish(
        Report(title, ("nothing is measured yet",), ())
    )  # first, so that a file that can't be written fails now
    attempts = Attempts(device, 60 * args.minutes)
    bandwidth = read_bandwidth(device)
    notes = (
        *_notes(args, shapes, num_tokens, bandwidth),
        *_equality_notes(device, attempts),
    )
    loads = [Load(count, args.prompt_length, num_tokens) for count in counts]
    rows: list[Row] = []

    def report() -> Report:
        return Report(title, (*notes, *attempts.troubles), tuple(rows))

    try:
        for row in _rows(shapes, loads, device, bandwidth, attempts):
            rows.append(row)
            logger.info(" | ".join(row.cells))
            publish(report())
    finally:
        publish(report())
    return report()


def _title(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU, tiny shapes"
    return f"The engine on {name}"


def _notes(
    args: argparse.Namespace, shapes: Sequence[Shape], num_tokens: int, bandwidth: float
) -> tuple[str, ...]:
    dtypes = ", ".join(sorted({str(shape.dtype).removeprefix("torch.") for shape in shapes}))
    return (
        f"{time.strftime('%Y-%m-%d')}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, random weights in {dtypes}; prompts of {args.prompt_length} "
        f"tokens, {num_tokens} new ones, greedy, prefill left out",
        f"floor: weights, keys and values at the measured {bandwidth / 1e9:,.0f} GB/s",
    )


def _equality_notes(device: torch.device, attempts: Attempts) -> Iterator[str]:
    for dtype, remark in ((torch.float32, ""), (torch.bfloat16, "; rounding may make some differ")):
        name = str(dtype).removeprefix("torch.")
        equal = attempts.run(f"equality in {name}", partial(num_equal, device, dtype))
        if equal is not None:
            yield (
                f"greedy tokens of a small model in {name}: {equal[0]} of {equal[1]} sequences as "
                f"generate's{remark}"
            )


def _rows(
    shapes: Sequence[Shape],
    loads: Sequence[Load],
    device: torch.device,
    bandwidth: float,
    attempts: Attempts,
) -> Iterator[Row]:
    for shape in shapes:
        loaded = attempts.run(shape.name, partial(build, shape, device))
        if loaded is not None:
            for load in loads:
                yield _row(shape, loaded, load, bandwidth, attempts)


def _row(
    shape: Shape, loaded: BenchmarkModel, load: Load, bandwidth: float, attempts: Attempts
) -> Row:
    name = f"{shape.name}, {load.num_seqs} sequences"
    graphs = attempts.run(f"{name}: engine", lambda: engine_rate(loaded, load, cuda_graphs=True))
    plain = attempts.run(
        f"{name}: engine without graphs", lambda: engine_rate(loaded, load, cuda_graphs=False)
    )
    static_rate = attempts.run(
        f"{name}: generate, one batch", lambda: static_batch_rate(loaded, load)
    )
    rate_in_threads = None
    if load.num_seqs <= MAX_THREADS:
        rate_in_threads = attempts.run(
            f"{name}: generate, threads", lambda: threads_rate(loaded, load)
        )
    length = graphs.mean_length if graphs else load.prompt_length + load.num_tokens / 2
    return Row(
        model=shape.name,
        num_seqs=load.num_seqs,
        floor_s=step_bytes(loaded, load.num_seqs, length) / bandwidth,
        step_s=graphs.step_s if graphs else None,
        plain_step_s=plain.step_s if plain else None,
        num_captured=graphs.num_captured if graphs else None,
        peak_bytes=graphs.peak_bytes if graphs else None,
        planned_bytes=graphs.planned_bytes if graphs else None,
        static_rate=static_rate,
        threads_rate=rate_in_threads,
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    main()
