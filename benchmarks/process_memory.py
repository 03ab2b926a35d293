"""Measures a replica's memory on the CPU: while it loads its weights, and when it serves.

Each model is loaded, warmed up and given prompts in a process of its own, which has imported what
a replica imports, Ray too, but has joined no cluster. "peak" is the growth of the largest resident
memory while the weights are loaded and packed, and the same without the pages of the file, which
Linux can drop at any time; both are compared with the bytes of the weights. "besides" is the
process's proportional share of memory after the prompts, without its weights and its keys and
values.

The models have random weights in the shapes of `cpu_shapes`; they are written to a temporary folder
first.

Run: python -m benchmarks.process_memory
"""

import argparse
import gc
import resource
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Final

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.cpu_shapes import PYDOC_CHAT, SHAPES, chosen_dtype
from benchmarks.random_model import FOLDER
from deployments.compute.cpu.memory import keep_freed_memory
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import load_model
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.scheduling.sequence import SequenceRequest

MIB: Final = 2**20

NUM_SEQS, MAX_MODEL_LEN, PROMPT_TOKENS, NUM_KV_TOKENS = 32, 2048, 1024, 16_384

PERIOD_S: Final = 0.005
"""How often memory is read while a model loads."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes of one process.

    Attributes:
        imports: Proportional memory before the load.
        weights: The weights as they are in memory.
        peak: Growth of the resident memory's peak while loading.
        own_peak: The same without mapped files.
        kv: Keys and values.
        serving: Proportional memory after a prompt.
    """

    imports: int
    weights: int
    peak: int
    own_peak: int
    kv: int
    serving: int


def measure(source: str, dtype: str) -> Measured:
    """Load a model in this process and use it."""
    import deployments.text_generator  # noqa: F401 # for the memory that a replica's imports take

    keep_freed_memory()
    process, cpu = psutil.Process(), torch.device("cpu")
    imports, resident = process.memory_full_info().pss, process.memory_info()
    with own_peak() as own:
        loaded = load_model(source, revision=None, dtype=dtype, device=cpu)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident.rss
    limits = EngineLimits(NUM_SEQS, MAX_MODEL_LEN, 512, kv_blocks=None)
    engine = Engine(loaded, limits)
    engine.warm_up()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for i in range(NUM_SEQS):
        engine.add(SequenceRequest(str(i), tuple(range(5, 5 + PROMPT_TOKENS // 4)), params))
    while engine.has_work:
        engine.step()
    gc.collect()
    return Measured(
        imports,
        loaded.num_weight_bytes,
        peak,
        max(own) - (resident.rss - resident.shared),
        engine.kv_bytes,
        process.memory_full_info().pss,
    )


@contextmanager
def own_peak() -> Iterator[list[int]]:
    """Read the resident memory without mapped files, again and again, inside the context."""
    process, done, found = psutil.Process(), threading.Event(), [0]

    def read() -> None:
        while not done.wait(PERIOD_S):
            memory = process.memory_info()
            found.append(memory.rss - memory.shared)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield found
    finally:
        done.set()
        reader.join()


def folder_of(name: str, root: Path, dtype: torch.dtype) -> str:
    """Return the folder of a model, which is made unless it is pydoc-chat."""
    if name == PYDOC_CHAT:
        return str(FOLDER)
    folder = root / name
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call] # transformers leaves it untyped
        SHAPES[name](), dtype=dtype
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(FOLDER).save_pretrained(folder)
    return str(folder)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", default=f"{PYDOC_CHAT},Qwen2-0.5B,Llama-3.2-1B")
    args = parser.parse_args()
    dtype = chosen_dtype()
    text = str(dtype).removeprefix("torch.")
    table = Table(title=f"{text}, MiB")
    for column in ("model", "imports", "weights", "peak", "peak without files", "KV", "besides"):
        table.add_column(column, justify="right" if table.columns else "left")
    for name in args.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="memory-") as root:
            folder = folder_of(name, Path(root), dtype)
            gc.collect()
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                found = process.submit(measure, folder, text).result()
        besides = found.serving - found.weights - found.kv
        peaks = (f"{p / MIB:.0f} = {p / found.weights:.2f}" for p in (found.peak, found.own_peak))
        cells = (f"{n / MIB:.0f}" for n in (found.kv, besides))
        row = (f"{found.imports / MIB:.0f}", f"{found.weights / MIB:.0f}", *peaks, *cells)
        table.add_row(name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
