"""Compares conversations that share a system prompt, with prefix reuse and without.

Every turn's prompt is the conversation so far and a new question, as chat clients send it. The
conversations take turns: `--max-num-seqs` of them run at once, and as soon as an answer ends, the
next conversation asks. From one turn to the next, all the others have run; the KV memory has room
for them all. Answers differ in length by a factor of up to three: with equal ones, those that began
together would end together, and eight questions would come in the same moment. Rounds with and
without reuse alternate, on one model and the same threads, and medians are compared, because
machines are noisy. Both must give the same answers.

The embedded chat model is small and has layers with a window. `--random` uses random weights in the
shape of six layers of Qwen2-0.5B instead: no windows, and prefill takes a larger part of the time.

Run: python -m benchmarks.prefix_caching
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.pairs import compared
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import num_cores
from deployments.engine.attention.kv_cache import KVShape
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model, prepare_model
from deployments.engine.scheduling.sequence import SequenceRequest

FOLDER = Path(__file__).resolve().parent.parent / "models/pydoc-chat"
SYSTEM_TOKENS = 192
QUESTION_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Round:
    """One round: seconds to the first token of each answer, total seconds, and the token ids."""

    first_token_s: Sequence[float]
    total_s: float
    answers: tuple[tuple[int, ...], ...]


def load(*, is_random: bool) -> LoadedModel:
    """Return the embedded model, or a random one with its tokenizer."""
    loaded = load_model(str(FOLDER), revision=None, dtype="float32", device=torch.device("cpu"))
    if not is_random:
        return loaded
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=loaded.text_config.vocab_size,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=6,
        num_attention_heads=14,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config)
    prepare_model(model)
    return LoadedModel(model, loaded.tokenizer, None, frozenset())


class Conversations:
    """Holds several conversations at once, turn by turn, on one engine."""

    def __init__(self, loaded: LoadedModel, args: argparse.Namespace) -> None:
        """Plan conversations of the size that the arguments give."""
        self._loaded = loaded
        self._args = args
        most = QUESTION_TOKENS + self._lengths[-1]
        self._max_model_len = SYSTEM_TOKENS + args.turns * most
        self._kv_blocks = self._blocks_of_all()

    @property
    def _lengths(self) -> range:
        """The lengths that answers may have."""
        return range(self._args.num_tokens // 2, self._args.num_tokens * 3 // 2 + 1)

    def _blocks_of_all(self) -> tuple[int, ...]:
        """Return the blocks that hold all conversations, and those that run once more."""
        shape = KVShape.of(self._loaded.text_config, self._loaded.model.dtype)
        num_sequences = self._args.conversations + self._args.max_num_seqs
        limits = EngineLimits(num_sequences, self._max_model_len, 512)
        return limits.layout(shape.group_capacities(self._max_model_len)).num_blocks

    def hold(self, *, prefix_caching: bool) -> Round:
        """Hold all conversations from start to end, on a new engine."""
        random = Random(0)
        vocab_size = self._loaded.text_config.vocab_size

        def words(count: int) -> tuple[int, ...]:
            return tuple(random.randrange(10, vocab_size) for _ in range(count))

        limits = EngineLimits(
            self._args.max_num_seqs,
            self._max_model_len,
            512,
            prefix_caching,
            kv_blocks=self._kv_blocks,
        )
        engine = Engine(self._loaded, limits)
        engine.warm_up()
        system = words(SYSTEM_TOKENS)
        said = [system] * self._args.conversations
        first_token_s: list[float] = []
        started = time.perf_counter()
        for _ in range(self._args.turns):
            prompts = [(*before, *words(QUESTION_TOKENS)) for before in said]
            lengths = random.choices(self._lengths, k=len(prompts))
            answers, waits = self._turn(engine, prompts, lengths)
            said = [(*p, *answer) for p, answer in zip(prompts, answers, strict=True)]
            first_token_s += waits
        return Round(first_token_s, time.perf_counter() - started, tuple(said))

    def _turn(
        self, engine: Engine, prompts: Sequence[tuple[int, ...]], lengths: Sequence[int]
    ) -> tuple[list[list[int]], list[float]]:
        answers: list[list[int]] = [[] for _ in prompts]
        asked, waits = [0.0] * len(prompts), [0.0] * len(prompts)
        unasked = iter(range(len(prompts)))

        def ask(count: int) -> None:
            for i in islice(unasked, count):
                params = SamplingParams(temperature=0, max_tokens=lengths[i], ignore_eos=True)
                engine.add(SequenceRequest(str(i), prompts[i], params))
                asked[i] = time.perf_counter()

        ask(self._args.max_num_seqs)
        while engine.has_work:
            for name, delta in engine.step():
                i = int(name)
                waits[i] = waits[i] or time.perf_counter() - asked[i]
                answers[i] += delta.token_ids
                ask(delta.finish_reason is not None)
        return answers, waits


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--conversations", type=int, help="conversations; by default four times --max-num-seqs"
    )
    parser.add_argument("--max-num-seqs", type=int, default=8, help="sequences that run at once")
    parser.add_argument("--turns", type=int, default=4, help="turns of each conversation")
    parser.add_argument(
        "--num-tokens", type=int, default=24, help="tokens of an answer, on average"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each, alternating")
    parser.add_argument("--random", action="store_true", help="random weights in a larger shape")
    args = parser.parse_args()
    args.conversations = args.conversations or 4 * args.max_num_seqs
    torch.set_num_threads(num_cores())
    conversations = Conversations(load(is_random=args.random), args)
    conversations.hold(prefix_caching=True)  # warm
    pairs = [
        (conversations.hold(prefix_caching=False), conversations.hold(prefix_caching=True))
        for _ in range(args.rounds)
    ]
    _require_equal_answers(pairs)
    table = Table(
        title=f"{args.conversations} conversations of {args.turns} turns, {args.max_num_seqs} at "
        f"once, {torch.get_num_threads()} thread(s), ms"
    )
    for column in ("", "recomputed", "prefixes reused", "ratio"):
        table.add_column(column, justify="right")
    figures: dict[str, Callable[[Round], float]] = {
        "time to first token, median": lambda r: statistics.median(r.first_token_s),
        "time to first token, worst": lambda r: max(r.first_token_s),
        "total": lambda r: r.total_s,
    }
    for name, seconds in figures.items():
        off, on, ratio = compared((seconds(off), seconds(on)) for off, on in pairs)
        table.add_row(name, f"{1000 * off:.0f}", f"{1000 * on:.0f}", f"{ratio:.1f}")
    Console().print(table)


def _require_equal_answers(pairs: Sequence[tuple[Round, Round]]) -> None:
    """Exit if two rounds gave different answers: they did not do the same work."""
    same = sum(off.answers == on.answers for off, on in pairs)
    if same < len(pairs):
        raise SystemExit(f"answers differ in {len(pairs) - same} of {len(pairs)} rounds")


if __name__ == "__main__":
    main()
