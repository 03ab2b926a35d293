"""Samples texts of pydoc-chat: ``python -m models.training.detector.sampled_documents``.

The project's own engine runs the committed chat model, at temperatures from 0.8 to 1.2, with a seed
for each answer. Each answer is saved at once, so an interrupted run continues where it stopped.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import torch
from rich.progress import Progress

from deployments.contract.sampling_params import SamplingParams
from deployments.engine.engine import Engine
from deployments.engine.limits import EngineLimits
from deployments.engine.model.loader import LoadedModel, load_model
from deployments.engine.scheduling.sequence import SequenceRequest
from models.training.conversations import PHRASINGS, SMALL_TALK, SYSTEM_PROMPTS
from models.training.corpus import Entry, load_corpus
from models.training.detector.document import (
    CACHE_DIR,
    Document,
    Source,
    document_of,
)
from models.training.detector.human_documents import human_documents
from models.training.made_up_names import MadeUpNames
from models.training.tokenizer import BOS
from models.training.train_pydoc_chat import MODEL_DIR, NUM_THREADS

SAMPLES_PATH: Final = CACHE_DIR / "samples.jsonl"
SEED: Final = 30
TEMPERATURES: Final = (0.8, 0.9, 1.0, 1.1, 1.2)
NUM_PER_ROUND: Final = {
    Source.LONG_ANSWER: 6,
    Source.ANSWER: 2,
    Source.COMPLETION: 4,
    Source.OPEN_QUESTION: 1,
    Source.UNKNOWN_NAME: 1,
}
NUM_ROUNDS: Final = 220
MAX_PROMPT_TOKENS: Final = 128
MAX_NEW_TOKENS: Final = 320
MAX_NUM_SEQS: Final = 96
OPEN_QUESTIONS: Final = (
    "How do I {verb} {thing} in Python?",
    "Write the documentation of a function that can {verb} {thing}.",
    "What is the best way to {verb} {thing}?",
    "Why would one {verb} {thing}?",
    "Is there a module to {verb} {thing}?",
)
VERBS: Final = (
    *("read", "write", "sort", "merge", "parse", "compress", "encrypt", "copy"),
    *("count", "compare", "format", "send", "cache", "validate", "split", "test"),
)
THINGS: Final = (
    *("files", "lists of dictionaries", "dates", "threads and processes", "JSON documents"),
    *("a web page", "numbers", "command line options", "a database", "log messages"),
    *("emails", "strings", "a class", "images", "passwords"),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and how its answer is sampled.

    Attributes:
        source: The kind of text that the answer is.
        origin: Decides the side of the split, as in `Document`.
        text: The prompt in the model's own format, control tokens spelt out.
        temperature: Sampling temperature.
        seed: The answer's seed, which also identifies it.
        min_tokens: Tokens before which the answer can't end.
    """

    source: Source
    origin: str
    text: str
    temperature: float
    seed: int
    min_tokens: int = 0


class PromptSource:
    """Makes the list of prompts; the same seed gives the same list."""

    def __init__(self, human: Sequence[Document], seed: int = SEED) -> None:
        """Take the openings that are to be completed from `human`."""
        self._rng = Random(seed)
        self._entries = self._rounds(load_corpus())
        self._made_up = MadeUpNames([entry.name for entry in load_corpus()]).for_training(self._rng)
        self._human = human

    def prompts(self, num_rounds: int = NUM_ROUNDS) -> Iterator[Prompt]:
        """Yield round after round, each with the same mix of sources."""
        number = 0
        for _ in range(num_rounds):
            for source, count in NUM_PER_ROUND.items():
                for _ in range(count):
                    origin, prompt = self._prompt(source)
                    temperature = TEMPERATURES[number % len(TEMPERATURES)]
                    yield Prompt(
                        source, origin, prompt, temperature, number, self._min_tokens(source)
                    )
                    number += 1

    def _prompt(self, source: Source) -> tuple[str, str]:
        rng = self._rng
        match source:
            case Source.ANSWER | Source.LONG_ANSWER:
                entry = next(self._entries)
                # The answer is the origin, so that names that share a docstring share a side.
                return f"answer {entry.answer}", self._chat(_about(entry.name, rng))
            case Source.UNKNOWN_NAME:
                name = next(self._made_up)
                return f"name {name}", self._chat(_about(name, rng))
            case Source.OPEN_QUESTION:
                question = rng.choice((*OPEN_QUESTIONS, *SMALL_TALK))
                question = question.format(verb=rng.choice(VERBS), thing=rng.choice(THINGS))
                return f"question {question}", self._chat(question)
            case _:
                document = rng.choice(self._human)
                opening = document.text.split()[: rng.randint(1, 8)]
                return document.origin, BOS + " ".join(opening)

    def _min_tokens(self, source: Source) -> int:
        match source:
            case Source.LONG_ANSWER:
                return self._rng.randint(48, 256)
            case Source.COMPLETION:
                return self._rng.randint(16, 160)
            case _:
                return 0

    def _chat(self, question: str) -> str:
        system = self._rng.choice(SYSTEM_PROMPTS) if self._rng.random() < 0.35 else None
        preamble = "" if system is None else f"{system}\n\n"
        return (
            f"{BOS}<start_of_turn>user\n{preamble}{question}<end_of_turn>\n<start_of_turn>model\n"
        )

    def _rounds(self, entries: Sequence[Entry]) -> Iterator[Entry]:
        while True:
            yield from self._rng.sample(entries, len(entries))


def _about(name: str, rng: Random) -> str:
    return rng.choice(PHRASINGS).format(name=name)


def read_samples(path: Path = SAMPLES_PATH) -> dict[int, Document]:
    """Return the samples so far by seed, in the order of the seeds."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as lines:
        found = [json.loads(line) for line in lines]
    return {it["seed"]: document_of(it) for it in sorted(found, key=lambda it: it["seed"])}


class Sampler:
    """Runs prompts on one engine, many at once."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._tokenizer: Any = loaded.tokenizer
        limits = EngineLimits(MAX_NUM_SEQS, MAX_PROMPT_TOKENS + MAX_NEW_TOKENS, 2048)
        self._engine = Engine(loaded, limits)

    def sample(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, str]]:
        """Yield each answer as soon as it is complete."""
        texts = dict.fromkeys(range(len(prompts)), "")
        for index, prompt in enumerate(prompts):
            self._engine.add(self._request(index, prompt))
        while self._engine.has_work:
            for name, delta in self._engine.step():
                texts[int(name)] += delta.text
                if delta.error is not None:
                    raise RuntimeError(f"the engine failed: {delta.error}")
                if delta.finish_reason is not None:
                    yield prompts[int(name)], texts.pop(int(name))

    def _request(self, index: int, prompt: Prompt) -> SequenceRequest:
        token_ids = self._tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        params = SamplingParams(
            temperature=prompt.temperature,
            seed=prompt.seed,
            min_tokens=prompt.min_tokens,
            max_tokens=MAX_NEW_TOKENS,
        )
        return SequenceRequest(str(index), tuple(token_ids[-MAX_PROMPT_TOKENS:]), params)


def load_chat_model() -> LoadedModel:
    """Load the committed pydoc-chat for the engine, in float32 on the CPU."""
    return load_model(str(MODEL_DIR), revision=None, dtype="float32", device=torch.device("cpu"))


def sample_what_is_missing(path: Path = SAMPLES_PATH) -> None:
    """Sample the answers that the file does not have yet, and append each one to it."""
    done = read_samples(path)
    prompts = [
        prompt for prompt in PromptSource(human_documents()).prompts() if prompt.seed not in done
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file, Progress() as progress:
        bar = progress.add_task("sampling", total=len(prompts))
        for prompt, text in Sampler(load_chat_model()).sample(prompts):
            document = Document(text, prompt.source, prompt.origin, prompt.temperature)
            file.write(json.dumps({"seed": prompt.seed, **asdict(document)}) + "\n")
            file.flush()
            progress.advance(bar)


def main() -> None:
    """Sample what is missing and print the number and size of all samples."""
    torch.set_num_threads(NUM_THREADS)
    started = time.perf_counter()
    sample_what_is_missing()
    texts = [document.text for document in read_samples().values()]
    seconds = round(time.perf_counter() - started)
    sys.stdout.write(f"{len(texts)} texts, {sum(map(len, texts))} characters; {seconds} s\n")


if __name__ == "__main__":
    main()
