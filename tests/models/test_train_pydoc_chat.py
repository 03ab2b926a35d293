from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from models.training.corpus import load_corpus
from models.training.recipe import Recipe, StepKind
from models.training.train_pydoc_chat import StepReport, Trainer

TINY = Recipe(tower_steps=1, tower_batch=4, joint_steps=2, text_batch=2, image_batch=2)


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_weights_and_they_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Muon iterates in bfloat16, which is slow on a processor without it; one step shows as much.
    monkeypatch.setattr(torch.optim, "Muon", partial(torch.optim.Muon, ns_steps=1))
    entries = load_corpus()[:300]
    reports: list[list[StepReport]] = []
    for name in ("first", "second"):
        trainer = Trainer(entries, TINY)
        reports.append(list(trainer.steps()))
        trainer.save(tmp_path / name)
    assert reports[0] == reports[1]
    assert [it.kind for it in reports[0]] == [StepKind.TOWER, StepKind.IMAGE, StepKind.TEXT]
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "first").dtype is torch.bfloat16


def test_a_later_stage_continues_from_saved_weights(tmp_path: Path) -> None:
    entries = load_corpus()[:300]
    before = Trainer(entries, TINY)
    before.save(tmp_path)
    after = Trainer(entries, TINY, start=tmp_path)
    saved = before.model.model.language_model.embed_tokens.weight.bfloat16()
    assert torch.equal(after.model.model.language_model.embed_tokens.weight, saved.float())
    assert after.model.lm_head.weight is after.model.model.language_model.embed_tokens.weight
