"""Trains pydoc-chat from scratch: ``python -m models.training.train_pydoc_chat``.

Deterministic by its seed on one machine: a fixed number of steps, two threads, every random number
from a seeded generator. Writes the model folder, except the card, the corpus and the evaluation.
"""

import copy
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma3ForConditionalGeneration

from models.training.architecture import build_model, build_processor
from models.training.batches import IGNORED, Batch, Renderer
from models.training.command_line import folder_argument
from models.training.conversations import ConversationSource
from models.training.corpus import Entry, load_corpus
from models.training.drawings import COLOURS, SHAPES, Drawing, random_drawing
from models.training.fast_norm import fast_norms
from models.training.recipe import STAGES, Recipe, StepKind
from models.training.tokenizer import train_tokenizer

MODEL_DIR = Path(__file__).parent.parent / "pydoc-chat"
CHECKPOINT_DIR = Path(tempfile.gettempdir()) / "pydoc-chat-checkpoint"
CHECKPOINT_EVERY: Final = 200
NUM_THREADS: Final = 2


@dataclass(frozen=True, slots=True)
class StepReport:
    """The result of one training step."""

    step: int
    kind: StepKind
    loss: float


class DrawingProbe(nn.Module):
    """Predicts shape and colour from an image's mean token; trains the tower, is not saved."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.shape = nn.Linear(hidden_size, len(SHAPES))
        self.colour = nn.Linear(hidden_size, len(COLOURS))

    def loss(self, image_tokens: Tensor, drawings: Sequence[Drawing]) -> Tensor:
        """Return the mean cross entropy; image_tokens: [images, tokens, hidden]."""
        pooled = image_tokens.float().mean(dim=1)
        shapes = torch.tensor([SHAPES.index(drawing.shape) for drawing in drawings])
        colours = torch.tensor([tuple(COLOURS).index(drawing.colour) for drawing in drawings])
        shape_loss = functional.cross_entropy(self.shape(pooled), shapes)
        return shape_loss + functional.cross_entropy(self.colour(pooled), colours)


class Trainer:
    """Owns the model, its optimizers and its batches."""

    def __init__(
        self, entries: tuple[Entry, ...], recipe: Recipe, *, start: Path | None = None
    ) -> None:
        """Build everything from the recipe's seed; the weights come from `start`, if given."""
        torch.manual_seed(recipe.seed)
        self._recipe = recipe
        self._rng = random.Random(recipe.seed)
        texts = [text for entry in entries for text in (f" {entry.name}", entry.answer)]
        self.processor = build_processor(train_tokenizer(texts))
        self.model = build_model(self.processor.tokenizer) if start is None else _load(start)
        self.model.set_attn_implementation("eager")
        self._probe = DrawingProbe(self.model.lm_head.in_features)
        self._renderer = Renderer(self.processor)
        self._source = ConversationSource(entries, self._rng, refused_share=recipe.refused_share)
        self._text_batches = self._sorted_text_batches()
        self._optimizers = self._build_optimizers()

    def steps(self) -> Iterator[StepReport]:
        """Run the recipe's steps, one for each item taken from the iterator."""
        self.model.train()
        for step in range(self._recipe.num_steps):
            kind = self._recipe.kind(step)
            self._set_rates(step)
            with fast_norms():
                loss = self._loss(kind)
                loss.backward()  # type: ignore[no-untyped-call] # left untyped
            self._apply_gradients()
            yield StepReport(step, kind, loss.item())

    def save(self, folder: Path) -> None:
        """Save weights in bfloat16, configuration, tokenizer, processor and chat template."""
        folder.mkdir(parents=True, exist_ok=True)
        copy.deepcopy(self.model).bfloat16().save_pretrained(folder)
        self.processor.save_pretrained(folder)

    def _apply_gradients(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _loss(self, kind: StepKind) -> Tensor:
        match kind:
            case StepKind.TOWER:
                return self._tower_loss(self._recipe.tower_batch)
            case StepKind.IMAGE:
                probed = self._tower_loss(self._recipe.tower_batch // 2)
                return self._joint_loss(self._image_batch()) + 0.5 * probed
            case StepKind.TEXT:
                return self._joint_loss(next(self._text_batches))

    def _tower_loss(self, num_drawings: int) -> Tensor:
        drawings = [random_drawing(self._rng) for _ in range(num_drawings)]
        pixel_values = self._renderer.pixels(drawings)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            image_tokens = self.model.model.get_image_features(pixel_values).pooler_output
        return self._probe.loss(image_tokens, drawings)

    def _joint_loss(self, batch: Batch) -> Tensor:
        learned = batch.labels != IGNORED
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = self.model.model(
                input_ids=batch.token_ids,
                attention_mask=batch.attention_mask,
                pixel_values=batch.pixel_values,
                token_type_ids=None if batch.pixel_values is None else batch.image_mask,
                use_cache=False,
            )
            logits = self.model.lm_head(output.last_hidden_state[learned])
        loss = functional.cross_entropy(logits.float(), batch.labels[learned])
        if output.image_hidden_states is None:
            return loss
        return loss + 0.5 * self._probe.loss(output.image_hidden_states, batch.drawings)

    def _build_optimizers(self) -> list[torch.optim.Optimizer]:
        base, recipe = self.model.model, self._recipe
        text = list(base.language_model.parameters())
        tower = [*base.vision_tower.parameters(), *base.multi_modal_projector.parameters()]
        tower += self._probe.parameters()
        inner = {id(p) for p in base.language_model.layers.parameters() if p.ndim == 2}
        inner |= {id(p) for p in base.vision_tower.encoder.layers.parameters() if p.ndim == 2}

        def groups(*, are_inner: bool) -> list[dict[str, Any]]:
            parts = ((text, False), (tower, True))
            return [
                {"params": [p for p in part if (id(p) in inner) is are_inner], "is_tower": is_tower}
                for part, is_tower in parts
            ]

        return [
            torch.optim.Muon(groups(are_inner=True), lr=recipe.matrix_rate, weight_decay=0.0),
            torch.optim.AdamW(
                groups(are_inner=False),
                lr=recipe.rate,
                betas=(0.9, 0.98),
                weight_decay=0.0,
                fused=True,
            ),
        ]

    def _set_rates(self, step: int) -> None:
        peaks = (self._recipe.matrix_rate, self._recipe.rate)
        for optimizer, peak in zip(self._optimizers, peaks, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = peak * self._recipe.rate_share(step, is_tower=group["is_tower"])

    def _sorted_text_batches(self) -> Iterator[Batch]:
        """Yield batches of conversations of similar length, sampling 16 batches at a time."""
        size = self._recipe.text_batch
        while True:
            examples = [
                self._renderer.example(self._source.text_conversation()) for _ in range(size * 16)
            ]
            examples.sort(key=lambda example: len(example.token_ids))
            batches = [examples[at : at + size] for at in range(0, len(examples), size)]
            self._rng.shuffle(batches)
            yield from map(self._renderer.batch, batches)

    def _image_batch(self) -> Batch:
        conversations = [
            self._source.image_conversation(
                [random_drawing(self._rng) for _ in range(self._rng.choice((1, 1, 2)))]
            )
            for _ in range(self._recipe.image_batch)
        ]
        return self._renderer.batch([self._renderer.example(it) for it in conversations])


def _load(folder: Path) -> Gemma3ForConditionalGeneration:
    model = Gemma3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(model, Gemma3ForConditionalGeneration)
    # Otherwise the parts' configurations would be saved as float32, whatever the model's dtype.
    model.config.get_text_config().dtype = model.model.vision_tower.config.dtype = None
    return model


class LossBar(Progress):
    """A progress bar that shows the running loss of each kind of step."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        self._losses: dict[StepKind, float] = {}
        self._bar = self.add_task("", total=num_steps)

    def show(self, report: StepReport) -> None:
        """Advance by one step and update its kind's running loss."""
        before = self._losses.get(report.kind, report.loss)
        self._losses[report.kind] = 0.95 * before + 0.05 * report.loss
        losses = ", ".join(f"{kind} loss {loss:.3f}" for kind, loss in self._losses.items())
        self.update(self._bar, advance=1, description=losses)


def train(folder: Path, stages: Sequence[Recipe]) -> None:
    """Train stage by stage, with checkpoints in CHECKPOINT_DIR, and save the model."""
    start: Path | None = None
    with LossBar(sum(recipe.num_steps for recipe in stages)) as bar:
        for recipe in stages:
            trainer = Trainer(load_corpus(), recipe, start=start)
            for report in trainer.steps():
                bar.show(report)
                if (report.step + 1) % CHECKPOINT_EVERY == 0:
                    trainer.save(CHECKPOINT_DIR)
            trainer.save(CHECKPOINT_DIR)
            start = CHECKPOINT_DIR
    trainer.save(folder)


def main() -> None:
    """Train and save."""
    folder = folder_argument(__doc__, MODEL_DIR, NUM_THREADS)
    train(folder, STAGES)


if __name__ == "__main__":
    main()
