"""A fake classifier."""

import asyncio

from deployments.contract import Classification, ClassificationRequest, ClassifierDescription
from deployments.errors import ContextLengthExceededError, RaystreamError

MAX_MODEL_LEN = 512


class FakeClassifier:
    """Scores the share of capital letters. Each word is a token, and two more are special ones."""

    def __init__(
        self, model_id: str = "c", labels: tuple[str, ...] = ("small", "capital", "odd")
    ) -> None:
        self.refusal: RaystreamError | None = None
        self.answers: asyncio.Event | None = None
        self.is_cancelled = False
        self.loaded: asyncio.Event | None = None
        self.requests: list[ClassificationRequest] = []
        self.num_pings = 0
        self.sickness: RaystreamError | None = None
        self.description = ClassifierDescription(
            id=model_id,
            created=1_700_000_000,
            max_model_len=MAX_MODEL_LEN,
            labels=labels,
            is_multi_label=False,
        )

    async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
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
            self._classify(index, text, request.truncate)
            for index, text in enumerate(request.texts)
        )

    def _classify(self, index: int, text: str, truncate: bool) -> Classification:
        num_tokens = len(text.split()) + 2
        is_too_long = num_tokens > MAX_MODEL_LEN
        if is_too_long and not truncate:
            raise ContextLengthExceededError(
                f"The text has {num_tokens} tokens; the model reads {MAX_MODEL_LEN} at most.",
                f"input[{index}]",
            )
        capital = sum(map(str.isupper, text)) / len(text)
        others = (0.0,) * (len(self.description.labels) - 2)
        scores = ((1 - capital), capital, *others)[: len(self.description.labels)]
        return Classification(scores, min(num_tokens, MAX_MODEL_LEN), is_too_long)

    async def describe(self) -> ClassifierDescription:
        if self.loaded is not None:
            await self.loaded.wait()
        return self.description

    async def ping(self) -> None:
        self.num_pings += 1
        if self.sickness is not None:
            raise self.sickness
