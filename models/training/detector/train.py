"""Trains pydoc-detector from nothing: ``python -m models.training.detector.train``.

Deterministic by its seed on one machine: two threads, every draw from a seeded generator. Needs
what ``sampled_documents`` has sampled. Writes the model's folder but for the card and
the evaluation.
"""

import argparse
import random
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from models.training.detector.architecture import LABELS, MAX_TOKENS, build_model, train_tokenizer
from models.training.detector.document import CACHE_DIR, Document, Label
from models.training.detector.extra_documents import extra_documents
from models.training.detector.human_documents import human_documents
from models.training.detector.pieces import Cutter, Piece, balanced
from models.training.detector.recipe import Recipe
from models.training.detector.sampled_documents import read_samples
from models.training.train_pydoc_chat import NUM_THREADS

MODEL_DIR: Final = Path(__file__).parents[2] / "pydoc-detector"
CHECKPOINT_PATH: Final = CACHE_DIR / "training.pt"


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What one round through the documents did; the first is number 1."""

    epoch: int
    num_pieces: int
    loss: float


class Trainer:
    """Owns the model, its optimizer and the stream of pieces."""

    def __init__(self, documents: Sequence[Document], recipe: Recipe) -> None:
        """Build everything from the recipe's seed; all documents are trained on."""
        torch.manual_seed(recipe.seed)
        self._recipe = recipe
        self._documents = documents
        self._rng = random.Random(recipe.seed)
        self._cutter = Cutter(self._rng)
        first = self._epoch_pieces()
        self.tokenizer: Any = train_tokenizer(piece.text for piece in first)
        self.model = build_model(self.tokenizer)
        self._num_steps = recipe.epochs * -(-len(first) // recipe.batch)
        self._step = 0
        self._epoch = 0
        self._optimizer = self._build_optimizer()

    def epochs(self) -> Iterator[EpochReport]:
        """Go through the documents as often as the recipe says, once with each item asked for."""
        self.model.train()
        while self._epoch < self._recipe.epochs:
            pieces = self._epoch_pieces()
            losses = [self._take_step(batch) for batch in self._batches(pieces)]
            self._epoch += 1
            yield EpochReport(self._epoch, len(pieces), sum(losses) / len(losses))

    def save(self, folder: Path) -> None:
        """Write weights in float32, configuration and tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to go on after an epoch as if nothing had been."""
        return {
            "made_of": self._made_of(),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "done": (self._epoch, self._step),
            "random": (self._rng.getstate(), torch.get_rng_state()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state; one of another recipe or other documents changes nothing."""
        if state["made_of"] != self._made_of():
            return
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._epoch, self._step = state["done"]
        draws, torch_draws = state["random"]
        self._rng.setstate(draws)
        torch.set_rng_state(torch_draws)

    def _made_of(self) -> str:
        texts = "".join(document.text for document in self._documents)
        return f"{self._recipe} {zlib.crc32(texts.encode())}"

    def _epoch_pieces(self) -> list[Piece]:
        """Cut anew. What was recited is a person's, so it is nothing to learn pydoc-chat from."""
        pieces = [it for it in self._cutter.pieces(self._documents) if not it.is_recited]
        return balanced(pieces, self._rng)

    def _batches(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Yield batches of like length, in random order."""
        ordered = sorted(pieces, key=lambda piece: len(piece.text))
        size = self._recipe.batch
        batches = [ordered[at : at + size] for at in range(0, len(ordered), size)]
        self._rng.shuffle(batches)
        yield from batches

    def _take_step(self, pieces: Sequence[Piece]) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._recipe.rate * self._recipe.rate_share(self._step, self._num_steps)
        loss = self._loss(pieces)
        loss.backward()  # type: ignore[no-untyped-call] # left untyped
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._step += 1
        return loss.item()

    def _loss(self, pieces: Sequence[Piece]) -> Tensor:
        inputs = self.tokenizer([piece.text for piece in pieces], padding=True, return_tensors="pt")
        token_ids, mask = inputs["input_ids"], inputs["attention_mask"]
        output = self.model(
            input_ids=self._masked(token_ids),
            attention_mask=mask,
            position_ids=self._positions(mask),
        )
        labels = torch.tensor([LABELS.index(piece.label) for piece in pieces])
        return functional.cross_entropy(output.logits, labels)

    def _masked(self, token_ids: Tensor) -> Tensor:
        is_hidden = torch.rand(token_ids.shape) < self._recipe.masked_share
        is_hidden &= token_ids > max(self.tokenizer.all_special_ids)
        return token_ids.masked_fill(is_hidden, self.tokenizer.mask_token_id)

    def _positions(self, mask: Tensor) -> Tensor:
        """Return RoBERTa's positions, some rows' moved: [batch, length], int64."""
        num_rows, length = mask.shape
        is_shifted = torch.rand(num_rows, 1) < self._recipe.shifted_share
        shifts = torch.randint(0, MAX_TOKENS - length + 1, (num_rows, 1)) * is_shifted
        padding: int = self.tokenizer.pad_token_id
        return (mask.cumsum(dim=1) + shifts) * mask + padding

    def _build_optimizer(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.model.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if p.ndim != 2]
        groups = [
            {"params": matrices, "weight_decay": self._recipe.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self._recipe.rate, betas=(0.9, 0.98), fused=True)


def all_documents() -> tuple[Document, ...]:
    """Return what people wrote and what was sampled, both sides of the split.

    Raises:
        SystemExit: Nothing was sampled yet.
    """
    samples = tuple(read_samples().values())
    if not samples:
        raise SystemExit("run first: python -m models.training.detector.sampled_documents")
    return (*human_documents(), *samples)


def training_documents(documents: Sequence[Document]) -> list[Document]:
    """Return what of `documents` is trained on, and what is trained on beside them."""
    held_out = [it for it in documents if it.is_held_out]
    people = [it for it in held_out if it.source.label is Label.HUMAN]
    return [*(it for it in documents if not it.is_held_out), *extra_documents(people)]


def train(folder: Path, recipe: Recipe) -> None:
    """Train on what is not held out, print each epoch's loss, and write the model.

    A run that was ended goes on after its last whole epoch.
    """
    started = time.perf_counter()
    trainer = Trainer(training_documents(all_documents()), recipe)
    if CHECKPOINT_PATH.exists():
        trainer.restore(torch.load(CHECKPOINT_PATH))
    for report in trainer.epochs():
        torch.save(trainer.state(), CHECKPOINT_PATH)
        seconds = round(time.perf_counter() - started)
        sys.stdout.write(
            f"epoch {report.epoch} of {recipe.epochs}: {report.num_pieces} pieces, "
            f"loss {report.loss:.4f}, {seconds} s\n"
        )
        sys.stdout.flush()
    trainer.save(folder)
    CHECKPOINT_PATH.unlink(missing_ok=True)


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=MODEL_DIR)
    folder: Path = parser.parse_args().folder
    torch.set_num_threads(NUM_THREADS)
    torch.set_flush_denormal(True)  # the optimizer's averages of rare tokens fade into them
    train(folder, Recipe())


if __name__ == "__main__":
    main()
