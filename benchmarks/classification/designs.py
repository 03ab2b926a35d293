"""The designs that are compared, on the same model folder."""

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers

from benchmarks.baselines.batch_on_arrival import BatchOnArrival
from benchmarks.baselines.piece_per_call import PiecePerCall
from benchmarks.baselines.queue_batcher import QueueBatcher
from deployments.contract.generation import Refused
from deployments.contract.model_spec import ModelConfig, ModelSpec
from deployments.contract.pooling import Pooled, PoolingRequest
from deployments.pooling.pooling_worker import BatchStats
from deployments.text_pooler import TextPooler

Kind = Literal["queue", "pieces", "serve.batch", "raystream"]
Classify = Callable[[Sequence[str]], Awaitable[object]]
MAX_BATCHED_TOKENS = 2048
NO_LIMIT = 1_000_000


@dataclass(frozen=True, slots=True)
class Design:
    """A design and its settings; designs without settings ignore them.

    Attributes:
        kind: The hand-made queue batcher; one call per piece; `@serve.batch` around the device; or
            this project's classifier.
        max_batch_size: BATCH_SIZE_MAX.
        timeout_s: BATCH_TIMEOUT.
    """

    kind: Kind
    max_batch_size: int = 1
    timeout_s: float = 0.0

    @property
    def name(self) -> str:
        """The name in tables."""
        has_settings = self.kind in ("queue", "serve.batch")
        return (
            f"{self.kind} {self.max_batch_size} {self.timeout_s:g}" if has_settings else self.kind
        )

    @property
    def path(self) -> str:
        """The first segment of its URLs' paths."""
        return self.name.replace(" ", "-")


QUEUE_BATCHERS = tuple(
    Design("queue", size, timeout_s)
    for size, timeout_s in itertools.product((8, 16, 32), (0.5, 0.3, 0.1))
)
"""The matrix that the queue batcher's author measured; see `benchmarks.baselines`."""

CHOSEN_QUEUE_BATCHER = Design("queue", 16, 0.1)
"""The settings that its author chose."""

PIECES = Design("pieces")
SERVE_BATCH = Design("serve.batch", 32, 0.01)
RAYSTREAM = Design("raystream")
ALL = (*QUEUE_BATCHERS, PIECES, SERVE_BATCH, RAYSTREAM)


@dataclass(slots=True)
class Counts:
    """The model's calls, and the pieces in them."""

    calls: int = 0
    pieces: int = 0

    def note(self, num_pieces: int) -> None:
        """Count a call of the model."""
        self.calls += 1
        self.pieces += num_pieces


class CountedClassifier(TextPooler):
    """Counts the micro-batches of this project's classifier."""

    def __init__(self, spec: ModelSpec, counts: Counts) -> None:
        self._counts = counts
        super().__init__(spec)

    def _hand_over(self, stats: BatchStats) -> None:
        self._counts.note(stats.num_sequences)
        super()._hand_over(stats)


def spec_of(folder: str) -> ModelSpec:
    """Return the spec of a replica of this model, with an unlimited queue."""
    entry = ModelConfig(
        id="benchmark",
        source=folder,
        task="classify",
        dtype="bfloat16",
        device="cpu",
        max_model_len=512,
        max_batched_tokens=MAX_BATCHED_TOKENS,
        max_queued_requests=NO_LIMIT,
    )
    return ModelSpec(entry, folder, 0)


def stock_pipeline(folder: str) -> Callable[[Sequence[str]], Sequence[object]]:
    """Return transformers' own pipeline, which pads each batch to its longest text."""
    pipe: Any = transformers.pipeline(
        "text-classification", model=folder, dtype=torch.bfloat16, device="cpu"
    )

    def run(texts: Sequence[str]) -> Sequence[object]:
        results: Sequence[object] = pipe(list(texts), batch_size=len(texts))
        return results

    return run


def ours(classifier: TextPooler) -> Classify:
    """Return this project's classifier as a function of a request's pieces."""
    numbers = itertools.count()

    async def classify(pieces: Sequence[str]) -> object:
        request = PoolingRequest(str(next(numbers)), tuple(pieces))
        answer = await classifier.pool(request)
        if isinstance(answer, Refused):
            raise answer.error
        assert isinstance(answer, Pooled), "it takes no turns"
        return [each.scores for each in answer.texts]

    return classify


@asynccontextmanager
async def running(
    design: Design, pipeline: Callable[[Sequence[str]], Sequence[object]], counts: Counts
) -> AsyncIterator[Classify]:
    """Run a baseline around a model while the block runs."""

    def counted(texts: Sequence[str]) -> Sequence[object]:
        counts.note(len(texts))
        return pipeline(texts)

    match design.kind:
        case "queue":
            batcher = QueueBatcher(counted, design.max_batch_size, design.timeout_s)
            async with batcher.running():
                yield batcher.classify
        case "serve.batch":
            yield BatchOnArrival(counted, design.max_batch_size, design.timeout_s).classify
        case "pieces":
            yield PiecePerCall(counted).classify
        case "raystream":
            raise ValueError("raystream is not a baseline")
