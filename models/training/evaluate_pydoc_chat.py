"""Evaluates the saved pydoc-chat: ``python -m models.training.evaluate_pydoc_chat``.

Loads the model by the plain Auto classes, asks by stock greedy ``generate``, prints the figures and
writes them to ``evaluation.json`` beside the weights. Training has seen none of these questions but
those about the trained names.
"""

import hashlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import Progress
from transformers import AutoModelForImageTextToText, AutoProcessor

from models.training.command_line import folder_argument, write_evaluation
from models.training.conversations import (
    FOLLOW_UPS,
    IMAGE_QUESTIONS,
    PHRASINGS,
    SYSTEM_PROMPTS,
    TWO_IMAGE_QUESTIONS,
    Conversation,
    Turn,
    refusal,
)
from models.training.corpus import Entry, load_corpus
from models.training.drawings import answer_about, random_drawing
from models.training.generated_answers import AnswerGenerator, GeneratedAnswer, Question
from models.training.made_up_names import MadeUpNames
from models.training.train_pydoc_chat import MODEL_DIR, NUM_THREADS

SEED: Final = 1_000_003
NUM_UNSEEN: Final = 200
NUM_PAIRS: Final = 100
NUM_FOLLOW_UPS: Final = 400
MAX_FAILURES_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """The number of questions of one kind that were answered exactly."""

    exact: int
    asked: int
    failures: tuple[dict[str, str], ...]

    @classmethod
    def of(cls, answers: Sequence[GeneratedAnswer]) -> "Figure":
        """Count exact answers and keep a few failures to show."""
        failed = [answer for answer in answers if not answer.is_exact]
        shown = tuple(
            {"asked": it.question.case, "expected": it.question.expected, "said": it.text}
            for it in failed[:MAX_FAILURES_SHOWN]
        )
        return cls(len(answers) - len(failed), len(answers), shown)

    def as_json(self) -> dict[str, Any]:
        """Return the counts, their share and the kept failures."""
        share = round(self.exact / self.asked, 5)
        return {
            "share": share,
            "exact": self.exact,
            "asked": self.asked,
            "failures": list(self.failures),
        }


def trained_questions(entries: Sequence[Entry]) -> Iterator[Question]:
    """Ask about every name in every phrasing, without and with a system prompt."""
    for index, entry in enumerate(entries):
        for offset, phrasing in enumerate(PHRASINGS):
            turn = Turn(phrasing.format(name=entry.name), entry.answer)
            system = SYSTEM_PROMPTS[(index + offset) % len(SYSTEM_PROMPTS)]
            yield Question(Conversation((turn,)), entry.name)
            yield Question(Conversation((turn,), system), entry.name)


def refusal_questions(entries: Sequence[Entry]) -> Iterator[Question]:
    """Ask about made-up names that were held out of training."""
    rng = random.Random(SEED)
    made_up = MadeUpNames([entry.name for entry in entries]).for_evaluation(NUM_UNSEEN, SEED)
    for kind, name in made_up:
        turn = Turn(rng.choice(PHRASINGS).format(name=name), refusal(name))
        yield Question(Conversation((turn,), rng.choice((None, *SYSTEM_PROMPTS))), kind)


def drawing_questions(count: int, num_drawings: int) -> Iterator[Question]:
    """Ask about new drawings, `num_drawings` (one or two) at a time."""
    rng = random.Random(SEED + num_drawings)
    texts = IMAGE_QUESTIONS if num_drawings == 1 else TWO_IMAGE_QUESTIONS
    for _ in range(count):
        drawings = tuple(random_drawing(rng) for _ in range(num_drawings))
        turn = Turn(rng.choice(texts), answer_about(*drawings), drawings, rng.random() < 0.75)
        case = " | ".join(f"{drawing.description}, {drawing}" for drawing in drawings)
        yield Question(Conversation((turn,), rng.choice((None, *SYSTEM_PROMPTS))), case)


def follow_up_questions(entries: Sequence[Entry]) -> Iterator[Question]:
    """Ask about a second name after a first one, which may be made up."""
    rng = random.Random(SEED)
    made_up = MadeUpNames([entry.name for entry in entries]).for_evaluation(
        NUM_FOLLOW_UPS, SEED + 9
    )
    for _, unknown in made_up:
        first, second = rng.sample(entries, 2)
        is_refused = rng.random() < 0.25
        refused = (unknown, refusal(unknown))
        name, answer = refused if is_refused else (first.name, first.answer)
        turns = (
            Turn(rng.choice(PHRASINGS).format(name=name), answer),
            Turn(rng.choice(FOLLOW_UPS).format(name=second.name), second.answer),
        )
        yield Question(Conversation(turns), f"{name}, then {second.name}")


def evaluate(folder: Path) -> dict[str, Any]:
    """Return all figures for the model in a folder."""
    started = time.perf_counter()
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call] # left untyped
    generator = AnswerGenerator(model.generate, processor)
    entries = load_corpus()
    suites = {
        "trained_names": list(trained_questions(entries)),
        "unseen_made_up_names": list(refusal_questions(entries)),
        "unseen_drawings": list(drawing_questions(NUM_UNSEEN, 1)),
        "unseen_pairs_of_drawings": list(drawing_questions(NUM_PAIRS, 2)),
        "follow_ups": list(follow_up_questions(entries)),
    }
    answers = {name: _answer(generator, name, questions) for name, questions in suites.items()}
    return {
        "weights_sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "method": "greedy model.generate in left-padded batches of 128, exact comparison",
        "seed": SEED,
        "corpus_names": len(entries),
        "phrasings": len(PHRASINGS),
        "figures": {name: Figure.of(said).as_json() for name, said in answers.items()},
        "names_exact_in_every_phrasing": _always_exact(answers["trained_names"]),
        "torch": torch.__version__,
        "seconds": round(time.perf_counter() - started),
    }


def _answer(
    generator: AnswerGenerator, name: str, questions: Sequence[Question]
) -> list[GeneratedAnswer]:
    with Progress() as progress:
        task = progress.add_task(name, total=len(questions))
        return generator.answer(questions, lambda done: progress.advance(task, done))


def _always_exact(answers: Sequence[GeneratedAnswer]) -> int:
    ever_wrong = {answer.question.case for answer in answers if not answer.is_exact}
    return len({answer.question.case for answer in answers} - ever_wrong)


def main() -> None:
    """Evaluate, print, and write evaluation.json."""
    folder = folder_argument(__doc__, MODEL_DIR, NUM_THREADS)
    write_evaluation(evaluate(folder), folder)


if __name__ == "__main__":
    main()
