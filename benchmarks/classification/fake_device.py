"""A device of known speed: a call takes 20 ms plus 1 ms per text.

So measurements depend only on which texts a design gives the device, and when.
"""

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.classification.designs import Counts, spec_of
from deployments.pooling.pooling_model import PoolingModel
from deployments.pooling.request_queue import TokenIds
from deployments.text_pooler import TextPooler

CALL_S = 0.020
TEXT_S = 0.001

Sleep = Callable[[float], None]


class FakeDevice:
    """Sleeps for the time of a call and returns equal results."""

    def __init__(self, sleep: Sleep = time.sleep) -> None:
        """Create the device; `sleep` blocks for a number of seconds."""
        self.counts = Counts()
        self._sleep = sleep

    def __call__(self, texts: Sequence[object]) -> list[float]:
        """Run a batch; return a result for each text."""
        self.counts.note(len(texts))
        self._sleep(CALL_S + TEXT_S * len(texts))
        return [0.5] * len(texts)


class _FakeModel(PoolingModel):
    """The fake device as the model that the worker calls."""

    def __init__(self, stock: PoolingModel, device: FakeDevice) -> None:
        """Take the place of a model, with its layout and its probe."""
        super().__init__(
            stock.model,
            stock.layout,
            stock.probe,
            max_batched_tokens=stock.max_batched_tokens,
        )
        self._fake = device

    def __call__(
        self, sequences: Sequence[TokenIds], type_ids: Sequence[TokenIds | None] = ()
    ) -> torch.Tensor:
        """Return two equal probabilities for each sequence."""
        return torch.tensor([[result] * 2 for result in self._fake(sequences)])


class FakeDeviceClassifier(TextPooler):
    """Runs this project's classifier and its worker on a fake device."""

    def __init__(self, folder: str, device: FakeDevice) -> None:
        """Load a model, but use only its tokenizer."""
        self._fake = device
        super().__init__(spec_of(folder))

    def _place(self) -> PoolingModel:
        return _FakeModel(super()._place(), self._fake)
