from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from models.training.search.documentation import Description
from models.training.search.encoder import Encoder, Index
from models.training.search.entries import Entry
from models.training.search.train import Recipe, Trainer

TINY = Recipe(bag_steps=2, joint_steps=2, batch=8, warmup_steps=1)
WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa")
ENTRIES = [Entry(f"m.{word}", f"function m.{word}: Does what {word} does.") for word in WORDS]
DESCRIPTIONS = [Description(f"m.{word}", f"Work as the {word} works.", 0) for word in WORDS]

pytestmark = pytest.mark.slow


def test_the_same_recipe_gives_the_same_weights(tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for name in ("first", "second"):
        trainer = Trainer(ENTRIES, DESCRIPTIONS, TINY)
        losses.append(list(trainer.steps()))
        trainer.save(tmp_path / name)
    assert losses[0] == losses[1]
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_what_is_saved_is_loaded_by_sentence_transformers_and_has_learned(tmp_path: Path) -> None:
    recipe = Recipe(bag_steps=30, joint_steps=10, batch=8, warmup_steps=3)
    trainer = Trainer(ENTRIES, DESCRIPTIONS, recipe)
    losses = list(trainer.steps())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    trainer.save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer("word " * 200)["input_ids"]) > 200
    index = Index(Encoder(tmp_path), ENTRIES)
    best = index.best([it.text for it in DESCRIPTIONS], 1)
    assert best == [[number] for number in range(len(ENTRIES))]


def test_held_out_entries_are_in_no_batch() -> None:
    held_out = [it for it in ENTRIES if it.is_held_out]
    assert held_out
    learned = len(ENTRIES) - len(held_out)
    trainer = Trainer(ENTRIES, DESCRIPTIONS, Recipe(bag_steps=5, joint_steps=0, batch=learned))
    seen: set[str] = set()
    asked = trainer._loss

    def remembered(entries: list[Entry], *, is_bag: bool) -> torch.Tensor:
        seen.update(entry.name for entry in entries)
        return asked(entries, is_bag=is_bag)

    trainer._loss = remembered  # type: ignore[method-assign, assignment] # only remembers names
    list(trainer.steps())
    assert len(seen) == learned
    assert seen.isdisjoint(entry.name for entry in held_out)


def test_the_bag_is_what_the_untrained_layer_computes() -> None:
    trainer = Trainer(ENTRIES, DESCRIPTIONS, TINY)
    trainer.model.eval()
    texts = [*(it.text for it in ENTRIES), *(it.text for it in DESCRIPTIONS)]
    with torch.inference_mode():
        bag, whole = (trainer._embed(texts, is_bag=is_bag) for is_bag in (True, False))
    torch.testing.assert_close(bag, whole, atol=1e-4, rtol=1e-4)


def test_the_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    recipe = Recipe()
    shares = [recipe.rate_share(step) for step in range(recipe.num_steps)]
    peak = shares.index(1.0)
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[-1] == pytest.approx(0.0, abs=1e-4)
