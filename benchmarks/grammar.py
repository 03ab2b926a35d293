"""Compares decode steps whose rows follow a grammar with the same steps without one.

Rounds of both kinds alternate, on one model and the same threads. A round's result is the median of
its decode steps; the figure shown is the median over the pairs, because machines are noisy. The
grammar is a list of objects too long to end within a round, so every step has all its rows.

Run: python -m benchmarks.grammar
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from llguidance import LLMatcher
from rich.console import Console

from benchmarks.pairs import compared
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import num_cores
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import load_model
from deployments.engine.scheduling.sequence import SequenceRequest

FOLDER = Path(__file__).resolve().parent.parent / "models/pydoc-chat"
PROMPT = tuple(range(100, 132))
NUM_WARM_STEPS = 4
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}},
        "required": ["name", "count"],
        "additionalProperties": False,
    },
}


def step_seconds(engine: Engine, params: SamplingParams, num_rows: int) -> float:
    """Return the median of a round's decode steps; all rows run until the round ends."""
    for i in range(num_rows):
        engine.add(engine.compile_grammar(SequenceRequest(str(i), PROMPT, params)))
    for _ in range(NUM_WARM_STEPS):
        engine.step()
    seconds = []
    while engine.has_work:
        began = time.perf_counter()
        deltas = engine.step()
        if len(deltas) == num_rows:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def main() -> None:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=8, help="rows of each step")
    parser.add_argument("--num-tokens", type=int, default=100, help="tokens of each row")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each kind, alternating")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    args = parser.parse_args()
    torch.set_num_threads(num_cores())
    loaded = load_model(str(FOLDER), revision=None, dtype="float32", device=torch.device("cpu"))
    limits = EngineLimits(args.rows, 512, 512, prefix_caching=False)
    engine = Engine(loaded, limits)
    engine.warm_up()
    free = SamplingParams(
        temperature=args.temperature, max_tokens=args.num_tokens, ignore_eos=True, seed=1
    )
    grammar = LLMatcher.grammar_from_json_schema(
        json.dumps(SCHEMA), overrides={"whitespace_flexible": False}
    )
    bound = SamplingParams(
        temperature=args.temperature, max_tokens=args.num_tokens, seed=1, grammar=grammar
    )
    pairs = [
        (step_seconds(engine, bound, args.rows), step_seconds(engine, free, args.rows))
        for _ in range(args.rounds + 1)
    ][1:]  # the first is warm-up
    bound_s, free_s, ratio = compared(pairs)
    Console().print(
        f"{args.rows} rows, {torch.get_num_threads()} thread(s): a step takes {1000 * free_s:.2f} "
        f"ms free and {1000 * bound_s:.2f} ms with a grammar, {ratio:.2f} times as long"
    )


if __name__ == "__main__":
    main()
