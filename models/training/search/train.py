"""Trains pydoc-search from scratch: ``python -m models.training.search.train``.

Deterministic by its seed on one machine: one thread, every random number from a seeded generator.
Writes the model's folder, except entries, questions, card and evaluation.
"""

import json
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
from models.training.search.architecture import (
    HIDDEN,
    MATRYOSHKA_DIMENSIONS,
    MAX_TOKENS,
    build_model,
    train_tokenizer,
    with_pooler,
)
from models.training.search.documentation import Description
from models.training.search.entries import (
    MODEL_DIR,
    Entry,
    load_descriptions,
    load_entries,
)
from models.training.search.questions import EntryBatches, QuestionSource

NUM_THREADS: Final = 1
MAX_TRAINED_TOKENS: Final = 40
GROUP: Final = 64
REPORT_EVERY: Final = 50
SENTENCE_TRANSFORMERS_FILES: Final[dict[str, object]] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
        {
            "idx": 2,
            "name": "2",
            "path": "2_Normalize",
            "type": "sentence_transformers.models.Normalize",
        },
    ],
    "sentence_bert_config.json": {"max_seq_length": MAX_TOKENS, "do_lower_case": False},
    "config_sentence_transformers.json": {
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    },
    "1_Pooling/config.json": {
        "word_embedding_dimension": HIDDEN,
        "pooling_mode_cls_token": False,
        "pooling_mode_mean_tokens": True,
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    },
}
"""In the spelling that all versions of sentence-transformers read, and other servers, too."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides the weights, except the entries and their descriptions.

    The first steps leave the layer out, so that words find their meanings cheaply.

    Attributes:
        seed: Seed of every generator.
        bag_steps: Steps that train only the words' vectors, as a weighted bag.
        joint_steps: Steps of the whole model.
        batch: Questions in a step, each with its own entry; the others' are the wrong answers.
        warmup_steps: Steps over which the learning rates rise.
        rate: Peak learning rate (AdamW).
        vector_rate: The same for the words' vectors, most of which a step does not touch.
        weight_decay: Weight decay of all parameters.
        hidden_share: Share of the tokens that a step hides, so that none of them is relied on.
        scale: The factor of the cosines in the loss, an inverse temperature.
    """

    seed: int = 50
    bag_steps: int = 400
    joint_steps: int = 250
    batch: int = 256
    warmup_steps: int = 40
    rate: float = 1e-3
    vector_rate: float = 1e-2
    weight_decay: float = 0.01
    hidden_share: float = 0.1
    scale: float = 30.0

    @property
    def num_steps(self) -> int:
        """Number of all steps."""
        return self.bag_steps + self.joint_steps

    def rate_share(self, step: int) -> float:
        """Return a step's fraction of the peak learning rate: warm-up, then a cosine to zero."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """Owns the model, its optimizer and its batches."""

    def __init__(
        self, entries: Sequence[Entry], descriptions: Sequence[Description], recipe: Recipe
    ) -> None:
        """Build everything from the recipe's seed.

        The tokenizer reads all `entries`, as the index does; the rest sees only those that are not
        held out, and their `descriptions`.
        """
        torch.manual_seed(recipe.seed)
        rng = random.Random(recipe.seed)
        self._recipe = recipe
        texts = [*(it.text for it in entries), *(it.text for it in descriptions)]
        self.tokenizer: Any = train_tokenizer(texts)
        self.model: Any = build_model(self.tokenizer, texts)
        self._questions = QuestionSource(descriptions, rng)
        learned = [entry for entry in entries if not entry.is_held_out]
        self._batches = iter(EntryBatches(learned, recipe.batch, rng))
        self._optimizer = self._build_optimizer()

    def steps(self) -> Iterator[float]:
        """Run the recipe's steps, one for each item taken from the iterator; yield their losses."""
        self.model.train()
        for step in range(self._recipe.num_steps):
            for group in self._optimizer.param_groups:
                group["lr"] = group["peak"] * self._recipe.rate_share(step)
            loss = self._loss(next(self._batches), is_bag=step < self._recipe.bag_steps)
            loss.backward()  # type: ignore[no-untyped-call] # left untyped
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            yield loss.item()

    def save(self, folder: Path) -> None:
        """Save weights in float32, configuration, tokenizer and sentence-transformers' files."""
        folder.mkdir(parents=True, exist_ok=True)
        with_pooler(self.model).save_pretrained(folder)
        # Otherwise the file would keep the length to which training cuts its texts.
        self.tokenizer.backend_tokenizer.no_truncation()
        self.tokenizer.backend_tokenizer.no_padding()
        self.tokenizer.save_pretrained(folder)
        for name, content in SENTENCE_TRANSFORMERS_FILES.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _loss(self, entries: Sequence[Entry], *, is_bag: bool) -> Tensor:
        """Return the mean of both directions' cross-entropies, over all Matryoshka lengths."""
        questions = self._embed([self._questions.question(it) for it in entries], is_bag=is_bag)
        passages = self._embed([self._questions.passage(it) for it in entries], is_bag=is_bag)
        # Entries with one summary are no wrong answers to each other's questions.
        keys = torch.tensor([zlib.crc32(it.summary.encode()) for it in entries])
        is_twin = (keys[:, None] == keys).fill_diagonal_(False)
        right = torch.arange(len(entries))
        losses = []
        for length in MATRYOSHKA_DIMENSIONS:
            first, second = (
                functional.normalize(it[:, :length], dim=1) for it in (questions, passages)
            )
            scores = (self._recipe.scale * first @ second.T).masked_fill(is_twin, -math.inf)
            losses += [functional.cross_entropy(it, right) for it in (scores, scores.T)]
        weights = torch.tensor([length / HIDDEN for length in MATRYOSHKA_DIMENSIONS])
        weights = weights.repeat_interleave(2)
        return (torch.stack(losses) * weights).sum() / weights.sum()

    def _embed(self, texts: Sequence[str], *, is_bag: bool) -> Tensor:
        """Return the texts' vectors: [texts, hidden], float32; like lengths run together."""
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        groups = [order[at : at + GROUP] for at in range(0, len(order), GROUP)]
        means = [self._means([texts[index] for index in it], is_bag=is_bag) for it in groups]
        return torch.cat(means)[torch.tensor(order).argsort()]

    def _means(self, texts: list[str], *, is_bag: bool) -> Tensor:
        """Return the means of the last hidden states: [texts, hidden], float32."""
        inputs = self.tokenizer(
            texts,
            padding=True,
            truncation=True,
            max_length=MAX_TRAINED_TOKENS,
            return_tensors="pt",
        )
        mask = self._shown(inputs["attention_mask"])
        if is_bag:
            # What the layer begins with: its own last norm, and nothing added before it.
            words = self.model.embeddings(input_ids=inputs["input_ids"])
            hidden = self.model.encoder.layer[0].output.LayerNorm(words)
        else:
            hidden = self.model(inputs["input_ids"], attention_mask=mask).last_hidden_state
        summed: Tensor = (hidden * mask.unsqueeze(-1)).sum(dim=1)
        return summed / mask.sum(dim=1, keepdim=True)

    def _shown(self, mask: Tensor) -> Tensor:
        """Return the mask of the tokens that this step shows, the first one always."""
        if not self.model.training:
            return mask
        shown = mask * (torch.rand(mask.shape) >= self._recipe.hidden_share)
        shown[:, 0] = 1
        return shown

    def _build_optimizer(self) -> torch.optim.Optimizer:
        vectors = list(self.model.embeddings.word_embeddings.parameters())
        others = [p for p in self.model.parameters() if p is not vectors[0]]
        groups = [
            {"params": vectors, "peak": self._recipe.vector_rate},
            {"params": others, "peak": self._recipe.rate},
        ]
        return torch.optim.AdamW(
            groups, betas=(0.9, 0.98), weight_decay=self._recipe.weight_decay, fused=True
        )


def train(folder: Path, recipe: Recipe) -> None:
    """Train on the committed entries and descriptions, print the losses, and save the model."""
    started = time.perf_counter()
    trainer = Trainer(load_entries(), load_descriptions(), recipe)
    losses: list[float] = []
    for loss in trainer.steps():
        losses.append(loss)
        if len(losses) % REPORT_EVERY == 0:
            recent = sum(losses[-REPORT_EVERY:]) / REPORT_EVERY
            seconds = round(time.perf_counter() - started)
            sys.stdout.write(
                f"step {len(losses)} of {recipe.num_steps}: loss {recent:.4f}, {seconds} s\n"
            )
            sys.stdout.flush()
    trainer.save(folder)


def main() -> None:
    """Train and save."""
    folder = folder_argument(__doc__, MODEL_DIR, NUM_THREADS)
    torch.set_flush_denormal(True)  # the optimizer's averages of rare tokens decay to denormals
    train(folder, Recipe())


if __name__ == "__main__":
    main()
