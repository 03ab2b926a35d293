"""Measures what int8 and int4 weights gain in speed and lose in accuracy.

Speed is the time of a decode step in the shape of Qwen2-0.5B, with random weights. The kinds of
weights alternate, and medians are compared, because machines are noisy.

Accuracy is measured on the embedded chat model: the perplexity of answers (each token given all
tokens before it), and how often an answer equals the float32 answer. The model has learned its
answers by heart and is sure of them, so the perplexity of answers to other questions is also shown.
"logits" is the error of the logits of these answers: of each token, the root mean square of the
differences from float32's logits, as a fraction of the standard deviation of float32's; the mean of
all tokens.

Run: python -m benchmarks.quantization
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2Config, Qwen2ForCausalLM

from benchmarks.cpu_shapes import chosen_dtype
from benchmarks.gpu.shapes import QWEN_05B
from benchmarks.pairs import compared
from benchmarks.random_model import FOLDER
from deployments.compute.cpu.linear.quantization import check_quantization, quantize_model
from deployments.compute.cpu.memory import keep_freed_memory
from deployments.contract.sampling_params import SamplingParams
from deployments.device.device import num_cores
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model, prepare_model
from deployments.engine.scheduling.sequence import SequenceRequest
from models.training.batches import IGNORED, Renderer
from models.training.conversations import PHRASINGS, Conversation
from models.training.corpus import load_corpus
from models.training.evaluate_pydoc_chat import (
    drawing_questions,
    refusal_questions,
    trained_questions,
)
from models.training.generated_answers import AnswerGenerator, Question

CPU = torch.device("cpu")
PROMPT_TOKENS = 16
BATCH_SIZE = 64
KINDS = (None, "int8", "int4")
"""Weights: plain or quantized."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """One model's results on one kind of question.

    Attributes:
        said: The greedy answers.
        right: Perplexity of the right answers; None for questions about drawings.
        others: Perplexity of answers to other questions, which should be unlikely; None for
            questions about drawings.
        logits: The logits of each token of the right answers, [tokens, vocab], float32; None for
            questions about drawings.
    """

    said: tuple[str, ...]
    right: float | None
    others: float | None
    logits: torch.Tensor | None

    def error(self, exact: "Accuracy") -> float | None:
        """Return the error of the logits, compared with those of float32."""
        if self.logits is None or exact.logits is None:
            return None
        difference = (self.logits - exact.logits).square().mean(-1).sqrt()
        return float((difference / exact.logits.std(-1)).mean())


def random_models(dtype: torch.dtype) -> tuple[LoadedModel, ...]:
    """Return one model of Qwen2-0.5B's shape with each of `KINDS` of weights."""
    config = Qwen2Config(**QWEN_05B.options, dtype=dtype)
    # The tokenizer has fewer ids than the model, but the text is not used.
    tokenizer = load_model(str(FOLDER), revision=None, dtype="float32", device=CPU).tokenizer
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    torch.nn.Module.to(model, dtype)  # transformers wraps its own, which has no such type
    models = [copy.deepcopy(model) for _ in KINDS]
    for each, quantization in zip(models, KINDS, strict=True):
        prepare_model(each, quantization)
    return tuple(LoadedModel(each, tokenizer, None, frozenset()) for each in models)


def step_ms(loaded: LoadedModel, num_seqs: int, num_steps: int) -> tuple[float, float]:
    """Return the milliseconds of a prefill step, and the median of the decode steps.

    The first step prefills all prompts, which are short.
    """
    engine = Engine(loaded, EngineLimits(num_seqs, 256, 512, prefix_caching=False))
    engine.warm_up()
    params = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True)
    for i in range(num_seqs):
        prompt = tuple(range(100 + i, 100 + i + PROMPT_TOKENS))
        engine.add(SequenceRequest(str(i), prompt, params))
    times = []
    for _ in range(num_steps + 1):
        started = time.perf_counter()
        engine.step()
        times.append(1000 * (time.perf_counter() - started))
    return times[0], statistics.median(times[1:])


def speed_table(
    batch_sizes: Sequence[int], rounds: int, num_steps: int, dtype: torch.dtype
) -> Table:
    """Measure steps with all kinds of weights, alternating."""
    models = random_models(dtype)
    gib = ", ".join(f"{loaded.num_weight_bytes / 2**30:.2f}" for loaded in models)
    title = f"Qwen2-0.5B's shape, {gib} GiB, {torch.get_num_threads()} thread(s), ms a step"
    name = str(dtype).removeprefix("torch.")
    table = _table(title, ("step", name, "int8", "ratio", "int4", "ratio"))
    for size in batch_sizes:
        for loaded in models:
            step_ms(loaded, size, 1)  # warm
        found = [[step_ms(loaded, size, num_steps) for loaded in models] for _ in range(rounds)]
        prefill, decode = ([[each[kind] for each in one] for one in found] for kind in (0, 1))
        _add_medians(table, f"decode, {size} rows", decode)
        if size * PROMPT_TOKENS == 512:
            _add_medians(table, "prefill, 512 tokens", prefill)
    return table


def _add_medians(table: Table, name: str, found: Sequence[Sequence[float]]) -> None:
    """Add the milliseconds of all kinds of weights, and how many times as fast each is."""
    cells = [f"{statistics.median(plain for plain, *_ in found):.1f}"]
    for kind in range(1, len(KINDS)):
        _, after, ratio = compared([(each[0], each[kind]) for each in found])
        cells += [f"{after:.1f}", f"{ratio:.2f}"]
    table.add_row(name, *cells)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def chat_model(dtype: str, quantization: str | None) -> Any:
    """Return the embedded model with stock attention, quantized if requested."""
    model = AutoModelForImageTextToText.from_pretrained(FOLDER, dtype=getattr(torch, dtype))
    if quantization is not None:
        quantize_model(model, quantization)
    return model


def questions(count: int) -> dict[str, list[Question]]:
    """Return `count` questions of each kind: learned names, made-up names, and drawings."""
    entries = load_corpus()
    return {
        "learned names": list(trained_questions(entries))[:: 2 * len(PHRASINGS)][:count],
        "made-up names": list(refusal_questions(entries))[:count],
        "drawings": list(drawing_questions(count, 1)),
    }


def ask(model: Any, processor: Any, asked: Sequence[Question]) -> Accuracy:
    """Generate greedy answers, and compute the perplexity of right and of other answers."""
    generated = AnswerGenerator(model.generate, processor).answer(asked)
    said = {id(answer.question): answer.text for answer in generated}
    answers = tuple(said[id(question)] for question in asked)
    if any(question.conversation.turns[0].drawings for question in asked):
        return Accuracy(answers, None, None, None)
    right = [question.conversation for question in asked]
    others = [
        Conversation((replace(mine.turns[0], answer=other.turns[0].answer),), mine.system)
        for mine, other in zip(right, [*right[1:], right[0]], strict=True)
    ]
    renderer = Renderer(processor)
    logits, labels = answer_logits(model, renderer, right)
    return Accuracy(
        answers,
        perplexity(logits, labels),
        perplexity(*answer_logits(model, renderer, others)),
        logits,
    )


@torch.inference_mode()
def answer_logits(
    model: Any, renderer: Renderer, conversations: Sequence[Conversation]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits, [tokens, vocab], and the ids of the answers' tokens."""
    examples = [renderer.example(conversation) for conversation in conversations]
    found, labels = [], []
    for start in range(0, len(examples), BATCH_SIZE):
        batch = renderer.batch(examples[start : start + BATCH_SIZE])
        output = model(input_ids=batch.token_ids, attention_mask=batch.attention_mask)
        is_answer = batch.labels != IGNORED
        found.append(output.logits[is_answer].float())
        labels.append(batch.labels[is_answer])
    return torch.cat(found), torch.cat(labels)


def perplexity(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the perplexity of tokens."""
    return math.exp(cross_entropy(logits, labels).item())


def accuracy_table(count: int) -> Table:
    """Ask models with each kind of weights the same questions, and compare with float32."""
    processor = AutoProcessor.from_pretrained(FOLDER)  # type: ignore[no-untyped-call] # left untyped
    table = _table(
        "pydoc-chat; perplexity of the right answers and of others, logits, greedy answers",
        ("questions", "weights", "right", "others", "logits", "exact", "as float32"),
    )
    kinds = {
        f"{quantization}, {dtype}" if quantization else dtype: chat_model(dtype, quantization)
        for dtype in ("float32", "bfloat16")
        for quantization in KINDS
    }
    for name, asked in questions(count).items():
        found = {kind: ask(model, processor, asked) for kind, model in kinds.items()}
        expected = [question.expected for question in asked]
        for kind, accuracy in found.items():
            error = accuracy.error(found["float32"])
            table.add_row(
                f"{len(asked)} {name}",
                kind,
                "" if accuracy.right is None else f"{accuracy.right:.5f}",
                "" if accuracy.others is None else f"{accuracy.others:,.2f}",
                "" if error is None else f"{error:.4f}",
                _percent_equal(expected, accuracy.said),
                _percent_equal(found["float32"].said, accuracy.said),
            )
    return table


def _percent_equal(expected: Sequence[str], said: Sequence[str]) -> str:
    same = sum(one == other for one, other in zip(expected, said, strict=True))
    return f"{same / len(said):.1%}"


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-sizes", default="1,8,32", help="rows of a decode step, a list")
    parser.add_argument(
        "--rounds", type=int, default=3, help="rounds of each kind of weights, alternating"
    )
    parser.add_argument("--steps", type=int, default=20, help="decode steps of a round")
    parser.add_argument(
        "--questions", type=int, default=200, help="questions of each kind; 0 measures speed only"
    )
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--dtype", default="auto", help="type of the plain weights and of the rows")
    args = parser.parse_args()
    check_quantization("int4", CPU)
    keep_freed_memory()
    torch.set_num_threads(args.threads)
    sizes = [int(size) for size in args.batch_sizes.split(",") if size]
    if sizes:
        Console().print(speed_table(sizes, args.rounds, args.steps, chosen_dtype(args.dtype)))
    if args.questions:
        Console().print(accuracy_table(args.questions))


if __name__ == "__main__":
    main()
