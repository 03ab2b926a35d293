"""Compares the engine with `model.generate`, and with what the memory's bandwidth allows.

1. pydoc-chat in float32: the same prompts, greedily, for the same number of tokens, by the engine
   all at once and by `generate` one after another.
2. The shape of Qwen2-0.5B with random weights, in the dtype that bfloat16 models get on this CPU:
   the decode step compared with the floor, which is the time to read the weights once at the
   measured bandwidth; and the parts of the step. With --shape, other shapes, and only this part;
   see `cpu_shapes` for their names.

Rounds alternate, and medians are compared, because machines are noisy.

Run: python -m benchmarks.engine
     python -m benchmarks.engine --concurrency 1 --shape Qwen2-0.5B Llama-3.2-1B
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText

from benchmarks.cpu_shapes import FOLDER, chosen_dtype, load_shape
from benchmarks.pairs import compared
from deployments.compute.host_memory import keep_freed_memory
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, TextPart
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import num_compute_threads
from deployments.engine.detokenizing.detokenizer import Detokenizer
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model
from deployments.engine.model.runner import ModelRunner
from deployments.engine.recovery import sampling_recovery
from deployments.engine.scheduling.scheduler import Scheduler
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.prompt_encoder import EncodedPrompt, PromptEncoder
from models.training.corpus import load_corpus

CPU = torch.device("cpu")
READ_BYTES = 2**30
PROMPT_TOKENS = 64
PARTS = {
    "schedule": (Scheduler, "schedule"),
    "forward": (ModelRunner, "run"),
    "sample": (sampling_recovery, "sample"),
    "detokenize": (Detokenizer, "advance"),
}


def prompts(loaded: LoadedModel, count: int) -> list[tuple[int, ...]]:
    """Return questions about different names, as token ids."""
    names = [entry.name for entry in load_corpus()[:: len(load_corpus()) // count][:count]]
    return encoded_chats(loaded, [f"What does {name} do?" for name in names])


def encoded_chats(loaded: LoadedModel, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Return the token ids of conversations that begin with these texts."""
    requests = [
        GenerationRequest(text, (ChatMessage("user", (TextPart(text),)),), SamplingParams())
        for text in texts
    ]
    encoded = PromptEncoder(loaded.tokenizer, loaded.processor).encode(requests)
    return [prompt.token_ids for prompt in encoded if isinstance(prompt, EncodedPrompt)]


def engine_speed(
    loaded: LoadedModel,
    batch: list[tuple[int, ...]],
    num_tokens: int,
    max_num_seqs: int | None = None,
) -> float:
    """Answer all prompts, at most `max_num_seqs` or all at once; return tokens per second."""
    engine = Engine(loaded, EngineLimits(max_num_seqs or len(batch), 256, 512))
    engine.warm_up()
    started = time.perf_counter()
    add_all(engine, batch, num_tokens)
    while engine.has_work:
        engine.step()
    return len(batch) * num_tokens / (time.perf_counter() - started)


def add_all(engine: Engine, batch: list[tuple[int, ...]], num_tokens: int) -> None:
    """Add prompts that the engine answers greedily with `num_tokens` tokens each."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for i, prompt in enumerate(batch):
        engine.add(SequenceRequest(str(i), prompt, params))


def generate_speed(model: Any, batch: list[tuple[int, ...]], num_tokens: int) -> float:
    """Answer the prompts one by one; return tokens per second."""
    started = time.perf_counter()
    for prompt in batch:
        input_ids = torch.tensor([prompt])
        model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
    return len(batch) * num_tokens / (time.perf_counter() - started)


def compare_with_generate(counts: list[int], num_tokens: int, rounds: int) -> Table:
    """Return a table of both speeds, in tokens per second."""
    loaded = load_model(str(FOLDER), revision=None, dtype="float32", device=CPU)
    torch.set_num_threads(num_compute_threads(loaded.num_weight_bytes))
    stock = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32)
    table = Table(title=f"pydoc-chat, float32, {torch.get_num_threads()} thread(s), tokens/s")
    for column in ("sequences", "model.generate, in turn", "engine", "ratio"):
        table.add_column(column, justify="right")
    for count in counts:
        batch = prompts(loaded, count)
        pairs = [
            (engine_speed(loaded, batch, num_tokens), generate_speed(stock, batch, num_tokens))
            for _ in range(rounds)
        ]
        engine, generate, ratio = compared(pairs)
        table.add_row(str(count), f"{generate:.0f}", f"{engine:.0f}", f"{ratio:.1f}")
    return table


def read_seconds(memory: torch.Tensor) -> float:
    """Return how long all compute threads take to read a block of memory."""
    started = time.perf_counter()
    memory.sum()
    return time.perf_counter() - started


@contextmanager
def timed_parts() -> Iterator[dict[str, list[float]]]:
    """Time the parts of every step that runs inside the context."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name].append(time.perf_counter() - started)

        return call

    with ExitStack() as stack:
        for name, (owner, attribute) in PARTS.items():
            function = timed(name, getattr(owner, attribute))
            stack.enter_context(patch.object(owner, attribute, function))
        yield seconds


def compare_with_floor(shape: str, counts: list[int], num_steps: int, rounds: int) -> Table:
    """Return a table of the decode step, its floor and its parts, in milliseconds."""
    dtype = chosen_dtype()
    loaded = load_shape(shape, dtype)
    weight_bytes = loaded.num_weight_bytes
    embedding = loaded.model.get_input_embeddings()
    if isinstance(embedding, torch.nn.Embedding):
        # A step reads only one of its rows per token; the logits' layer has a table of its own.
        weight_bytes -= embedding.weight.nbytes
    torch.set_num_threads(num_compute_threads(weight_bytes))
    memory = torch.ones(READ_BYTES // 4)
    title = (
        f"{shape}'s shape, {dtype}, {torch.get_num_threads()} thread(s), "
        f"{weight_bytes / 1e6:.0f} MB a step; ms"
    )
    table = Table(title=title)
    for column in ("sequences", "GB/s", "floor", "step", "floor / step", *PARTS, "rest", "tok/s"):
        table.add_column(column, justify="right")
    for count in counts:
        measured = [decode_steps(loaded, count, num_steps, memory) for _ in range(rounds)]
        seconds = {
            name: statistics.median(value for each in measured for value in each[name])
            for name in measured[0]
        }
        floor = seconds["read"] * weight_bytes / memory.nbytes
        parts = [seconds[name] for name in PARTS]
        rest = seconds["step"] - sum(parts)
        table.add_row(
            str(count),
            f"{memory.nbytes / seconds['read'] / 1e9:.1f}",
            f"{1000 * floor:.1f}",
            f"{1000 * seconds['step']:.1f}",
            f"{floor / seconds['step']:.0%}",
            *(f"{1000 * part:.2f}" for part in (*parts, rest)),
            f"{count / seconds['step']:.0f}",
        )
    return table


def decode_steps(
    loaded: LoadedModel, count: int, num_steps: int, memory: torch.Tensor
) -> dict[str, list[float]]:
    """Return the seconds of decode steps, of their parts, and of memory reads in between."""
    batch = [tuple(range(i, i + PROMPT_TOKENS)) for i in range(count)]
    seconds: dict[str, list[float]] = defaultdict(list)
    with timed_parts() as parts:
        engine = Engine(loaded, EngineLimits(count, 1024, 512))
        engine.warm_up()
        add_all(engine, batch, num_steps + 2)
        while len(engine.step()) < count:  # until all prompts are prefilled
            pass
        for step in range(num_steps):
            if step % 4 == 0:
                seconds["read"].append(read_seconds(memory))
            parts.clear()
            started = time.perf_counter()
            engine.step()
            seconds["step"].append(time.perf_counter() - started)
            for name in PARTS:
                seconds[name].append(sum(parts[name]))
        while engine.has_work:
            engine.step()
    return seconds


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--concurrency", default="1,8,32", help="numbers of sequences, a list")
    parser.add_argument("--num-tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, alternating")
    parser.add_argument("--shape", nargs="+", default=(), help="names of shapes")
    args = parser.parse_args()
    counts = [int(count) for count in args.concurrency.split(",")]
    keep_freed_memory()
    console = Console()
    if not args.shape:
        console.print(compare_with_generate(counts, args.num_tokens, args.rounds))
    for shape in args.shape or ("Qwen2-0.5B",):
        console.print(compare_with_floor(shape, counts, args.num_tokens, args.rounds))


if __name__ == "__main__":
    main()
