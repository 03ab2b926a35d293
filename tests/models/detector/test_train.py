from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from models.training.corpus import load_corpus
from models.training.detector.architecture import MAX_TOKENS
from models.training.detector.document import Document, Source
from models.training.detector.train import EpochReport, Recipe, Trainer

TINY = Recipe(epochs=2, batch=4, warmup_steps=1)
LEARNING = Recipe(epochs=6, batch=4, warmup_steps=8)


def documents() -> list[Document]:
    return [
        Document(f"{word} {number} " * 12, source, f"{source} {number}", temperature)
        for word, source, temperature in (
            ("People write sentences that end.", Source.TOPIC, None),
            ("returned returned of of the", Source.LONG_ANSWER, 1.0),
        )
        for number in range(6)
    ]


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_weights_and_they_are_saved(tmp_path: Path) -> None:
    reports: list[list[EpochReport]] = []
    for name in ("first", "second"):
        trainer = Trainer(documents(), TINY)
        reports.append(list(trainer.epochs()))
        trainer.save(tmp_path / name)
    assert reports[0] == reports[1]
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "first")
    assert loaded.config.id2label == {0: "human", 1: "pydoc-chat"}
    assert AutoTokenizer.from_pretrained(tmp_path / "first").model_max_length == MAX_TOKENS


@pytest.mark.slow
def test_the_loss_falls() -> None:
    losses = [report.loss for report in Trainer(documents(), LEARNING).epochs()]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_an_interrupted_run_continues_as_if_uninterrupted(tmp_path: Path) -> None:
    whole = Trainer(documents(), TINY)
    reports = list(whole.epochs())
    ended = Trainer(documents(), TINY)
    next(ended.epochs())
    torch.save(ended.state(), tmp_path / "state.pt")
    resumed = Trainer(documents(), TINY)
    resumed.restore(torch.load(tmp_path / "state.pt"))
    assert list(resumed.epochs()) == reports[1:]
    for before, after in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(before, after)


@pytest.mark.slow
def test_a_state_of_another_run_is_ignored() -> None:
    trainer = Trainer(documents(), TINY)
    next(trainer.epochs())
    for other in (Trainer(documents()[:-1], TINY), Trainer(documents(), LEARNING)):
        other.restore(trainer.state())
        assert next(other.epochs()).epoch == 1


def test_recited_pieces_are_not_learned() -> None:
    people = [
        Document(f"A short text of a person, number {'i' * number}.", Source.TOPIC, "t")
        for number in range(12)
    ]
    answers = [entry.answer for entry in load_corpus() if 20 <= len(entry.answer) < 50][:8]
    recited = [Document(answer, Source.ANSWER, "a", 0.8) for answer in answers]
    own = [Document("A short text texts of of no person.", Source.ANSWER, "b", 0.8)]
    trainer = Trainer([*people, *recited, *own], TINY)
    assert next(trainer.epochs()).num_pieces == 2


def test_the_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    num_steps = 500
    shares = [Recipe().rate_share(step, num_steps) for step in range(num_steps)]
    peak = shares.index(1.0)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[-1] == pytest.approx(0.0, abs=1e-4)
