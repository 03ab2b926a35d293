"""Trains pydoc-detector from scratch: ``python -m models.training.detector.train``.

Deterministic by its seed on one machine: two threads, every random number from a seeded generator.
Needs the samples of ``sampled_documents``. Writes the model's folder, except the card and the
evaluation.
"""

import math
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

from models.training.command_line import folder_argument
from models.training.detector.architecture import LABELS, MAX_TOKENS, build_model, train_tokenizer
from models.training.detector.document import CACHE_DIR, Document, Label
from models.training.detector.human_documents import extra_documents, human_documents
from models.training.detector.pieces import Cutter, Piece, balanced
from models.training.detector.sampled_documents import read_samples
from models.training.train_pydoc_chat import NUM_THREADS

MODEL_DIR: Final = Path(__file__).parents[2] / "pydoc-detector"
CHECKPOINT_PATH: Final = CACHE_DIR / "training.pt"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, except the documents.

    Attributes:
        seed: Seed of every generator.
        epochs: Number of epochs; each cuts all documents anew.
        batch: Pieces in a step.
        warmup_steps: Steps over which the learning rate rises.
        rate: Peak learning rate (AdamW).
        weight_decay: Weight decay of matrices.
        masked_share: Share of the tokens that a step hides, so that none of them is relied on.
        shifted_share: Share of the pieces that begin at a random position instead of the first, so
            that all positions are learned.
    """

    seed: int = 40
    epochs: int = 5
    batch: int = 32
    warmup_steps: int = 60
    rate: float = 1e-3
    weight_decay: float = 0.05
    masked_share: float = 0.1
    shifted_share: float = 0.5

    def rate_share(self, step: int, num_steps: int) -> float:
        """Return a step's fraction of the peak learning rate: warm-up, then a cosine to zero."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, num_steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True, slots=True)
class EpochReport:
    """The result of one epoch; epochs are counted from 1."""

    epoch: int
    num_pieces: int
    loss: float


class Trainer:
    """Owns the model, its optimizer and its batches."""

    def __init__(self, documents: Sequence[Document], recipe: Recipe) -> None:
        """Build everything from the recipe's seed, to train on all `documents`."""
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
        """Run the recipe's epochs, one for each item taken from the iterator."""
        self.model.train()
        while self._epoch < self._recipe.epochs:
            pieces = self._epoch_pieces()
            losses = [self._take_step(batch) for batch in self._batches(pieces)]
            self._epoch += 1
            yield EpochReport(self._epoch, len(pieces), sum(losses) / len(losses))

    def save(self, folder: Path) -> None:
        """Save weights in float32, configuration and tokenizer."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue after an epoch with the same results."""
        return {
            "made_of": self._made_of(),
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "done": (self._epoch, self._step),
            "random": (self._rng.getstate(), torch.get_rng_state()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state; ignore one of another recipe or of other documents."""
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
        """Cut the documents anew, without recited pieces: a person wrote those."""
        pieces = [it for it in self._cutter.pieces(self._documents) if not it.is_recited]
        return balanced(pieces, self._rng)

    def _batches(self, pieces: list[Piece]) -> Iterator[list[Piece]]:
        """Yield batches of pieces of similar length, in random order."""
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
        """Return RoBERTa's positions, shifted in some rows: [batch, length], int64."""
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
    """Return people's and sampled documents, both sides of the split.

    Raises:
        SystemExit: There are no samples yet.
    """
    samples = tuple(read_samples().values())
    if not samples:
        raise SystemExit("run first: python -m models.training.detector.sampled_documents")
    return (*human_documents(), *samples)


def training_documents(documents: Sequence[Document]) -> list[Document]:
    """Return the training part of `documents`, and the extra documents."""
    held_out = [it for it in documents if it.is_held_out]
    people = [it for it in held_out if it.source.label is Label.HUMAN]
    return [*(it for it in documents if not it.is_held_out), *extra_documents(people)]


def train(folder: Path, recipe: Recipe) -> None:
    """Train on the training documents, print each epoch's loss, and save the model.

    An interrupted run continues after its last complete epoch.
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
    folder = folder_argument(__doc__, MODEL_DIR, NUM_THREADS)
    torch.set_flush_denormal(True)  # the optimizer's averages of rare tokens decay to denormals
    train(folder, Recipe())


if __name__ == "__main__":
    main()
