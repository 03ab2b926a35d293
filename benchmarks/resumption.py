"""Counts the answers that are not equal, to the last bit, to those of an undisturbed run.

An undisturbed sequence runs by itself: its prompt is prefilled in one step, and each token is
decoded in a step of its own. The same sequences are then run

- in company: they arrive in turn, share prefixes, are prefilled in chunks and decoded together;
- resumed alone: another engine continues an answer that was cut at a random index;
- resumed in company: the same, together with others, some of them new.

Each line tells how many of the next tokens' log-probabilities differ in any bit, and in how many
answers a token differs. Half of the sequences are greedy, half are drawn with a seed.

Run: python -m benchmarks.resumption
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, Qwen2ForCausalLM

from benchmarks.engine import CPU
from benchmarks.random_model import FOLDER
from benchmarks.three_million import config
from deployments.compute.cpu.memory import keep_freed_memory
from deployments.contract.output import TokenLogprobs
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model, prepare_model
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.tiny_models import FAMILIES, byte_tokenizer

NUM_TOKENS = 64
"""The last index at which an answer is cut."""

NUM_COMPARED = 8
"""Tokens that are compared after the cut."""

NUM_SEQUENCES = 24
SHARED_PREFIX = 24
MAX_MODEL_LEN = 288
MODES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Answer = list[tuple[int, TokenLogprobs]]
"""Each token with its log-probabilities."""


@dataclass
class Count:
    """Answers that were compared.

    Attributes:
        num_answers: How many.
        num_bits: Those with a log-probability that differs.
        num_tokens: Those with a token that differs.
    """

    num_answers: int = 0
    num_bits: int = 0
    num_tokens: int = 0

    def add(self, expected: Answer, found: Answer) -> None:
        """Compare two answers."""
        self.num_answers += 1
        self.num_bits += expected != found
        self.num_tokens += [token for token, _ in expected] != [token for token, _ in found]


@dataclass
class Counts:
    """The counts of one model."""

    company: Count = field(default_factory=Count)
    resumed_alone: Count = field(default_factory=Count)
    resumed_in_company: Count = field(default_factory=Count)


def varied() -> PreTrainedModel:
    """Return the model of 3 million parameters with random weights that give varied text."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config())
    for name, weight in model.named_parameters():
        if weight.dim() == 2 and "embed" not in name:
            gain = {"down_proj": 1.6, "o_proj": 0.5}.get(name.split(".")[-2], 1.0)
            torch.nn.init.normal_(weight, 0, gain / sqrt(weight.shape[1]))
    torch.nn.init.normal_(model.model.embed_tokens.weight, 0, 0.05)
    torch.nn.init.constant_(model.model.norm.weight, 8 / sqrt(model.config.hidden_size))
    return model


def models(dtype: str) -> Iterator[tuple[str, Callable[[], LoadedModel]]]:
    """Yield the models' names, and functions that load them."""

    def random_weights(make: Callable[[], PreTrainedModel]) -> Callable[[], LoadedModel]:
        def load() -> LoadedModel:
            model = make().to(MODES[dtype])  # type: ignore[arg-type] # transformers' own type
            prepare_model(model)
            return LoadedModel(model, byte_tokenizer(), None, frozenset())

        return load

    yield "3 million", random_weights(varied)
    yield (
        "pydoc-chat",
        lambda: load_model(str(FOLDER), revision=None, dtype=dtype, device=CPU),
    )
    for family in FAMILIES:
        yield family.name, random_weights(family.make)


def requests(vocab_size: int, max_model_len: int, random: Random) -> list[SequenceRequest]:
    """Return prompts of several lengths, a third of which begin alike."""
    longest = max_model_len - NUM_TOKENS - NUM_COMPARED - SHARED_PREFIX
    prefix = tuple(random.randrange(44, vocab_size) for _ in range(SHARED_PREFIX))
    made = []
    for i in range(NUM_SEQUENCES):
        own = tuple(
            random.randrange(44, vocab_size) for _ in range(random.randint(3, min(130, longest)))
        )
        params = SamplingParams(
            temperature=i % 2 * 0.8,
            seed=i,
            max_tokens=NUM_TOKENS + NUM_COMPARED,
            ignore_eos=True,
            top_logprobs=2,
        )
        made.append(SequenceRequest(str(i), prefix + own if i % 3 == 0 else own, params))
    return made


def run(engine: Engine, batch: Sequence[SequenceRequest], num_per_step: int) -> dict[str, Answer]:
    """Run requests, some of which arrive before each step."""
    answers: dict[str, Answer] = {request.sequence_id: [] for request in batch}
    waiting = list(batch)
    while waiting or engine.has_work:
        for request in waiting[:num_per_step]:
            engine.add(request)
        del waiting[:num_per_step]
        for sequence_id, delta in engine.step():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            answers[sequence_id] += zip(delta.token_ids, delta.logprobs, strict=True)
    return answers


def resumed(
    request: SequenceRequest, answer: Answer, index: int, name: str
) -> tuple[SequenceRequest, Answer]:
    """Return a request to continue an answer from an index, and what it must give."""
    end = index + NUM_COMPARED
    again = replace(
        request,
        sequence_id=name,
        params=replace(request.params, max_tokens=end),
        generated_token_ids=tuple(token for token, _ in answer[:index]),
        is_resumed=True,
    )
    return again, answer[index:end]


def count(loaded: LoadedModel, num_resumptions: int, random: Random) -> Counts:
    """Run one model's sequences undisturbed and otherwise, and compare."""
    length = min(MAX_MODEL_LEN, loaded.text_config.max_position_embeddings)
    batch = requests(loaded.text_config.vocab_size, length, random)
    lone = Engine(loaded, EngineLimits(1, length, length, prefix_caching=False))
    # In small blocks sequences outgrow their extents, so they are moved.
    crowded = Engine(loaded, EngineLimits(32, length, 512, block_size=16))
    for engine in (lone, crowded):
        engine.warm_up()
    counts = Counts()
    alone = {name: found for one in batch for name, found in run(lone, [one], 1).items()}
    for name, found in run(crowded, batch, 1).items():
        counts.company.add(alone[name], found)
    again, expected = {}, {}
    for i in range(num_resumptions):
        request = random.choice(batch)
        index = random.randint(0, NUM_TOKENS)
        name = f"resumed {i}"
        again[name], expected[name] = resumed(request, alone[request.sequence_id], index, name)
    num_alone = num_resumptions // 10
    for name in [*again][:num_alone]:
        counts.resumed_alone.add(expected[name], run(lone, [again[name]], 1)[name])
    for i, request in enumerate(random.sample(batch, len(batch)) * (num_resumptions // 100)):
        again[f"new {i}"] = replace(request, sequence_id=f"new {i}")
    others = [*again.values()][num_alone:]
    random.shuffle(others)
    for name, found in run(crowded, others, 3).items():
        if name in expected:
            counts.resumed_in_company.add(expected[name], found)
    return counts


def equality(num_resumptions: int, chosen: Sequence[str]) -> Table:
    """Return the table of what differs."""
    table = Table(title="answers, those that differ in a bit, those that differ in a token")
    for column in ("model", "dtype", "in company", "resumed alone", "resumed in company"):
        table.add_column(column, justify="right")
    num_models = sum(1 for dtype in MODES for _ in models(dtype))
    totals = Counts()
    for dtype in MODES:
        for name, load in models(dtype):
            if chosen and name not in chosen:
                continue
            found = count(load(), num_resumptions // num_models, Random(1))
            table.add_row(name, dtype, *_cells(found))
            Console(stderr=True).print(name, dtype, *_cells(found))
            for total, one in zip(_each(totals), _each(found), strict=True):
                total.num_answers += one.num_answers
                total.num_bits += one.num_bits
                total.num_tokens += one.num_tokens
    table.add_row("all", "", *_cells(totals))
    return table


def _each(counts: Counts) -> tuple[Count, Count, Count]:
    return counts.company, counts.resumed_alone, counts.resumed_in_company


def _cells(counts: Counts) -> list[str]:
    return [f"{c.num_answers} {c.num_bits} {c.num_tokens}" for c in _each(counts)]


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--resumptions", type=int, default=10_000)
    parser.add_argument("--models", nargs="*", default=[], help="names; all without any")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    Console().print(equality(args.resumptions, args.models))


if __name__ == "__main__":
    main()
