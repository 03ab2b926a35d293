"""Fakes of a classifier, of an embedding model and of a cross-encoder."""

import asyncio
import math
from collections.abc import Sequence

import numpy as np

from deployments.contract.descriptions import EmbeddingDescription, PoolerDescription
from deployments.contract.errors import ContextLengthExceededError, RaystreamError
from deployments.contract.pooling import (
    ROW_DTYPE,
    PooledText,
    PoolingInput,
    PoolingRequest,
    TextPair,
)
from tests.serve_app.by_method import ByMethod

MAX_MODEL_LEN = 512


def as_row(numbers: Sequence[float]) -> bytes:
    return np.array(numbers, ROW_DTYPE).tobytes()


class FakePooler(ByMethod):
    """Answers at once, or when a test lets it. Each word is a token; two more are special ones."""

    def __init__(self, description: PoolerDescription) -> None:
        self.refusal: RaystreamError | None = None
        self.answers: asyncio.Event | None = None
        self.is_cancelled = False
        self.loaded: asyncio.Event | None = None
        self.requests: list[PoolingRequest] = []
        self.num_pings = 0
        self.sickness: RaystreamError | None = None
        self.description = description

    def row(self, text: PoolingInput) -> Sequence[float]:
        raise NotImplementedError

    async def pool(self, request: PoolingRequest) -> tuple[PooledText, ...]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        if self.answers is not None:
            try:
                await self.answers.wait()
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise
        return tuple(
            self._pool(index, text, request.truncate) for index, text in enumerate(request.texts)
        )

    def _pool(self, index: int, text: PoolingInput, truncate: bool) -> PooledText:
        num_tokens = _num_tokens(text)
        is_too_long = num_tokens > MAX_MODEL_LEN
        if is_too_long and not truncate:
            raise ContextLengthExceededError(
                f"The text has {num_tokens} tokens; the model reads {MAX_MODEL_LEN} at most.",
                f"input[{index}]",
            )
        return PooledText(as_row(self.row(text)), min(num_tokens, MAX_MODEL_LEN), is_too_long)

    async def describe(self) -> PoolerDescription:
        if self.loaded is not None:
            await self.loaded.wait()
        return self.description

    async def ping(self) -> None:
        self.num_pings += 1
        if self.sickness is not None:
            raise self.sickness


def _num_tokens(text: PoolingInput) -> int:
    match text:
        case str():
            return len(text.split()) + 2
        case TextPair():
            return len(text.first.split()) + len(text.second.split()) + 3
        case _:
            return len(text)


class FakeClassifier(FakePooler):
    """Scores the share of capital letters."""

    def __init__(
        self, model_id: str = "c", labels: tuple[str, ...] = ("small", "capital", "odd")
    ) -> None:
        super().__init__(PoolerDescription(model_id, 1_700_000_000, MAX_MODEL_LEN, labels))

    def row(self, text: PoolingInput) -> Sequence[float]:
        assert isinstance(text, str)
        capital = sum(map(str.isupper, text)) / len(text)
        others = (0.0,) * (len(self.description.labels) - 2)
        return ((1 - capital), capital, *others)[: len(self.description.labels)]


WIDTH = 4


class FakeEmbedder(FakePooler):
    """Counts how often a text holds each of the letters a, b, c and d, and divides by the norm."""

    def __init__(
        self,
        model_id: str = "e",
        dimensions: tuple[int, ...] | None = None,
        prompts: tuple[tuple[str, str], ...] = (),
        default_prompt: str | None = None,
        is_normalized: bool = True,
    ) -> None:
        embedding = EmbeddingDescription(WIDTH, is_normalized, dimensions, prompts, default_prompt)
        super().__init__(
            PoolerDescription(model_id, 1_700_000_000, MAX_MODEL_LEN, embedding=embedding)
        )

    def row(self, text: PoolingInput) -> Sequence[float]:
        assert not isinstance(text, TextPair)
        counts = [text.count(each) for each in "abcd"] if isinstance(text, str) else text[:WIDTH]
        norm = math.hypot(*counts) or 1.0
        return [count / norm for count in counts]


class FakeCrossEncoder(FakePooler):
    """Scores the share of the first text's words that the second one holds."""

    def __init__(self, model_id: str = "x") -> None:
        super().__init__(PoolerDescription(model_id, 1_700_000_000, MAX_MODEL_LEN, ("LABEL_0",)))

    def row(self, text: PoolingInput) -> Sequence[float]:
        assert isinstance(text, TextPair)
        words = text.first.split()
        return [sum(word in text.second.split() for word in words) / len(words)]
