"""The engine beside `model.generate`, one request after the other, on the embedded chat model.

Both run the same prompts greedily, on the same model and the same threads, for the same number of
tokens. Rounds alternate, and the medians are compared, since machines are noisy.

Run: python -m benchmarks.engine
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForImageTextToText

from deployments.contract import ChatMessage, GenerationRequest, TextPart
from deployments.engine.engine import Engine
from deployments.engine.engine_limits import EngineLimits
from deployments.engine.model_loader import LoadedModel, load_model
from deployments.engine.sampling_params import SamplingParams
from deployments.engine.sequence import SequenceRequest
from deployments.gpu.device import num_cores
from deployments.prompt_encoder import EncodedPrompt, PromptEncoder
from models.training.corpus import load_corpus

FOLDER = Path(__file__).resolve().parent.parent / "models/pydoc-chat"


def prompts(loaded: LoadedModel, count: int) -> list[tuple[int, ...]]:
    """Return questions about different names, as token ids."""
    names = [entry.name for entry in load_corpus()[:: len(load_corpus()) // count][:count]]
    requests = [
        GenerationRequest(
            name, (ChatMessage("user", (TextPart(f"What does {name} do?"),)),), SamplingParams()
        )
        for name in names
    ]
    encoded = PromptEncoder(loaded.tokenizer, loaded.processor).encode(requests)
    return [prompt.token_ids for prompt in encoded if isinstance(prompt, EncodedPrompt)]


def engine_speed(loaded: LoadedModel, batch: list[tuple[int, ...]], num_tokens: int) -> float:
    """Answer all prompts at once; return tokens per second."""
    engine = Engine(loaded, EngineLimits(len(batch), 256, 512))
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    for i, prompt in enumerate(batch):
        engine.add(SequenceRequest(str(i), prompt, params))
    while engine.has_work:
        engine.step()
    return len(batch) * num_tokens / (time.perf_counter() - started)


def generate_speed(model: Any, batch: list[tuple[int, ...]], num_tokens: int) -> float:
    """Answer one prompt after the other; return tokens per second."""
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


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--concurrency", default="1,8,32", help="sequences at once, a list")
    parser.add_argument("--num-tokens", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn")
    args = parser.parse_args()
    torch.set_num_threads(num_cores())
    loaded = load_model(str(FOLDER), revision=None, dtype="float32", device=torch.device("cpu"))
    stock = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=torch.float32)
    table = Table(title=f"pydoc-chat, float32, {torch.get_num_threads()} thread(s), tokens/s")
    for column in ("sequences", "model.generate, in turn", "engine", "ratio"):
        table.add_column(column, justify="right")
    for count in map(int, args.concurrency.split(",")):
        batch = prompts(loaded, count)
        pairs = [
            (
                generate_speed(stock, batch, args.num_tokens),
                engine_speed(loaded, batch, args.num_tokens),
            )
            for _ in range(args.rounds)
        ]
        generate, engine = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(engine / generate for generate, engine in pairs)
        table.add_row(str(count), f"{generate:.0f}", f"{engine:.0f}", f"{ratio:.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
