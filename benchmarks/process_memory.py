"""Measures a replica's memory on the CPU: while it loads its weights, serves and rests.

Each model is loaded, warmed up and given prompts in a process of its own, which has imported what
a replica imports, Ray too, but has joined no cluster. "peak" is the growth of the largest resident
memory while the weights are loaded and packed, and the same without the pages of the file, which
Linux can drop at any time; both are compared with the bytes of the weights. "KV" are the bytes that
are reserved for keys and values. "start", "busy" and "idle" are the growth of the resident memory,
without mapped files, after the warm-up, after the prompts, and after free memory was given back.
"besides" is the process's proportional share of memory at last, without its weights.

The models have random weights in the shapes of `cpu_shapes`; they are written to a temporary folder
first.

Run: python -m benchmarks.process_memory
     python -m benchmarks.process_memory --shapes Sheared-LLaMA-1.3B --max-num-seqs 64 \
         --max-model-len 4096
"""

import argparse
import gc
import resource
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from operator import mul
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
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model
from deployments.engine.scheduling.sequence import SequenceRequest

MIB: Final = 2**20

NUM_PROMPTS, PROMPT_TOKENS = 32, 256

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
        kv: Reserved for keys and values.
        start: Growth of the resident memory without mapped files, after the warm-up.
        busy: The same after the prompts.
        idle: The same after free memory was given back.
        serving: Proportional memory at last.
    """

    imports: int
    weights: int
    peak: int
    own_peak: int
    kv: int
    start: int
    busy: int
    idle: int
    serving: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an engine holds at most.

    Attributes:
        num_seqs: Sequences.
        max_model_len: Tokens of a sequence.
        kv_bytes: Keys and values, unless the sequences can't fill as much.
    """

    num_seqs: int
    max_model_len: int
    kv_bytes: int

    def limits(self, loaded: LoadedModel) -> EngineLimits:
        """Return the limits of an engine for a model."""
        full = EngineLimits(self.num_seqs, self.max_model_len, 512, prefix_caching=False)
        shape = KVShape.of(loaded.text_config, loaded.model.dtype)
        layout = full.layout(shape.group_capacities(self.max_model_len))
        token_bytes = shape.group_token_bytes(self.max_model_len)
        sizes = [layout.block_size * each for each in token_bytes]
        part = self.kv_bytes / sum(map(mul, layout.num_blocks, sizes))
        one = layout.blocks_for(self.max_model_len)
        blocks = (
            min(number, max(least, int(part * number)))
            for number, least in zip(layout.num_blocks, one, strict=True)
        )
        return replace(full, kv_blocks=tuple(blocks))


def measure(source: str, dtype: str, sizes: Sizes) -> Measured:
    """Load a model in this process and use it."""
    import deployments.text_generator  # noqa: F401 # for the memory that a replica's imports take

    keep_freed_memory()
    process, cpu = psutil.Process(), torch.device("cpu")
    imports, resident = process.memory_full_info().pss, process.memory_info()

    def own_growth() -> int:
        memory = process.memory_info()
        return int(memory.rss - memory.shared - (resident.rss - resident.shared))

    with own_peak() as own:
        loaded = load_model(source, revision=None, dtype=dtype, device=cpu)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident.rss
    engine = Engine(loaded, sizes.limits(loaded))
    engine.warm_up()
    start = own_growth()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for i in range(NUM_PROMPTS):
        engine.add(SequenceRequest(str(i), tuple(range(5, 5 + PROMPT_TOKENS)), params))
    while engine.has_work:
        engine.step()
    busy = own_growth()
    while (wait_s := engine.give_back_memory()) is not None:
        time.sleep(wait_s)
    gc.collect()
    return Measured(
        imports,
        loaded.num_weight_bytes,
        peak,
        max(own) - (resident.rss - resident.shared),
        engine.kv_bytes,
        start,
        busy,
        own_growth(),
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
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences at once")
    parser.add_argument("--max-model-len", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--kv-gib", type=float, default=4, help="GiB of keys and values, at most")
    args = parser.parse_args()
    sizes = Sizes(args.max_num_seqs, args.max_model_len, int(args.kv_gib * 2**30))
    dtype = chosen_dtype()
    text = str(dtype).removeprefix("torch.")
    table = Table(title=f"{text}, MiB")
    names = ("model", "imports", "weights", "peak", "peak without files")
    for column in (*names, "KV", "start", "busy", "idle", "besides"):
        table.add_column(column, justify="right" if table.columns else "left")
    for name in args.shapes.split(","):
        with tempfile.TemporaryDirectory(prefix="memory-") as root:
            folder = folder_of(name, Path(root), dtype)
            gc.collect()
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                found = process.submit(measure, folder, text, sizes).result()
        besides = found.serving - found.weights
        peaks = (f"{p / MIB:.0f} = {p / found.weights:.2f}" for p in (found.peak, found.own_peak))
        figures = (found.kv, found.start, found.busy, found.idle, besides)
        cells = (f"{n / MIB:.0f}" for n in figures)
        row = (f"{found.imports / MIB:.0f}", f"{found.weights / MIB:.0f}", *peaks, *cells)
        table.add_row(name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
