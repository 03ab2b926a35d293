"""Compares a replica's memory plan, made from its configuration, with what it then allocates.

Each model is planned, loaded and warmed up in a process of its own, on the CPU. A model that writes
then computes a long prompt; one that classifies or embeds has computed its largest micro-batch when
it was warmed up. "weights" and "keys and values" compare the plan with the bytes of the tensors;
"process" compares the plan for the start, and for the keys and values of that prompt, with the
growth of the resident memory, without the files that it maps, but with what libraries allocate. The
embedded models are as they are; the others have random weights in well-known shapes.

Run: python -m benchmarks.memory_plan
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.gpu.shapes import QWEN_05B
from benchmarks.random_model import FOLDER
from deployments.contract.model_spec import ModelSpec, Task
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import CpuDevice
from deployments.engine.model.loader import load_config
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.placed_engine import place_engine
from deployments.pooling.model_loader import load_config as load_pooler_config
from deployments.pooling.placed_pooler import place_pooler
from deployments.replica.device_share import plan_share

MIB: Final = 2**20

LLAMA_1B: Final = LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
)
"""Source: config.json of meta-llama/Llama-3.2-1B."""

PROMPT_TOKENS: Final = 1024


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that were planned, and bytes that were allocated.

    Attributes:
        name: The model.
        weights: Planned and allocated bytes of the weights.
        kv: Of keys and values, which are reserved; None for a model that keeps none.
        process: Of weights, a step and a prompt, and the growth of the process.
    """

    name: str
    weights: tuple[int, int]
    kv: tuple[int, int] | None
    process: tuple[int, int]


def measure(name: str, source: str, task: Task) -> Measured:
    """Plan, load and use a model in this process."""
    spec = ModelSpec(
        id=name,
        source=source,
        revision=None,
        dtype="auto",
        device="cpu",
        num_gpus=0,
        num_threads=None,
        max_model_len=None,
        max_num_seqs=None,
        max_batched_tokens=None,
        task=task,
    )
    return _measure_generator(spec) if task == "generate" else _measure_pooler(spec)


def _measure_generator(spec: ModelSpec) -> Measured:
    before_bytes = _own_bytes()
    # The plan before the load: that of `placed` has the bytes of the loaded weights.
    planned = plan_share(spec, load_config(spec.source, revision=None), CpuDevice())
    placed = place_engine(spec, CpuDevice())
    engine = placed.engine
    length = min(PROMPT_TOKENS, placed.plan.sizes.max_model_len - 2)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    engine.add(SequenceRequest("prompt", tuple(range(5, 5 + length)), params))
    while engine.has_work:
        engine.step()
    return Measured(
        spec.id,
        (planned.demand.weight_bytes, placed.loaded.num_weight_bytes),
        (planned.kv.kv_bytes, engine.kv_bytes),
        (
            planned.start_bytes + length * planned.kv_token_bytes,
            _own_bytes() - before_bytes,
        ),
    )


def _measure_pooler(spec: ModelSpec) -> Measured:
    before_bytes = _own_bytes()
    config = load_pooler_config(spec.source, revision=None)
    planned = plan_share(spec, config, CpuDevice(), is_pooler=True)
    placed = place_pooler(planned, CpuDevice())
    return Measured(
        spec.id,
        (planned.demand.weight_bytes, placed.loaded.num_weight_bytes),
        None,
        (planned.demand.fixed_bytes, _own_bytes() - before_bytes),
    )


def _own_bytes() -> int:
    """Return the resident memory of this process, without files that it maps."""
    memory = psutil.Process().memory_info()
    return int(memory.rss - memory.shared)


def _folders(root: Path) -> Iterator[tuple[str, str, Task]]:
    """Yield each model's name, folder and task; those with random weights are made here."""
    yield "pydoc-chat", str(FOLDER), "generate"
    yield "pydoc-detector", str(FOLDER.parent / "pydoc-detector"), "classify"
    yield "pydoc-search", str(FOLDER.parent / "pydoc-search"), "embed"
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    made: Mapping[str, tuple[Any, PreTrainedConfig]] = {
        "Qwen2-0.5B": (Qwen2ForCausalLM, Qwen2Config(**QWEN_05B.options)),
        "Llama-3.2-1B": (LlamaForCausalLM, LLAMA_1B),
    }
    for name, (kind, config) in made.items():
        folder = root / name
        kind._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        yield name, str(folder), "generate"


def main() -> None:
    """Measure and print a table."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None).parse_args()
    table = Table(title="Planned / allocated, MiB, and their ratio, on the CPU")
    for column in ("model", "weights", "keys and values", "process"):
        table.add_column(column, justify="right" if table.columns else "left")
    with tempfile.TemporaryDirectory(prefix="plan-") as root:
        for model in _folders(Path(root)):
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                found = process.submit(measure, *model).result()
            pairs = map(_compared, (found.weights, found.kv, found.process))
            table.add_row(found.name, *pairs)
    Console(width=120).print(table)


def _compared(pair: tuple[int, int] | None) -> str:
    if pair is None:
        return "-"
    planned, allocated = pair
    return f"{planned / MIB:.1f} / {allocated / MIB:.1f} = {planned / allocated:.3f}"


if __name__ == "__main__":
    main()
