"""A device whose speed is known: a call takes 20 ms, and 1 ms for each text.

With it, what is left to see is when a design gives the device which texts.
"""

import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.classification.designs import Counts, spec_of
from deployments.classifier.sequence_classifier import SequenceClassifier
from deployments.text_classifier import TextClassifier

CALL_S = 0.020
TEXT_S = 0.001

Sleep = Callable[[float], None]


class FakeDevice:
    """Takes its time and says nothing."""

    def __init__(self, sleep: Sleep = time.sleep) -> None:
        """Start unused; `sleep` blocks for so many seconds."""
        self.counts = Counts()
        self._sleep = sleep

    def __call__(self, texts: Sequence[object]) -> list[float]:
        """Run a batch; return a result for each text."""
        self.counts.note(len(texts))
        self._sleep(CALL_S + TEXT_S * len(texts))
        return [0.5] * len(texts)


class _FakeModel(SequenceClassifier):
    """The fake device as the model that the worker calls."""

    def __init__(self, stock: SequenceClassifier, device: FakeDevice) -> None:
        """Take the model that it stands for."""
        super().__init__(stock._model, stock.layout, stock.probe)
        self._fake = device

    def __call__(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return two equal probabilities for each sequence."""
        return torch.tensor([[result] * 2 for result in self._fake(sequences)])


class FakeDeviceClassifier(TextClassifier):
    """This project's classifier, worker and all, in front of a fake device."""

    def __init__(self, folder: str, device: FakeDevice) -> None:
        """Load a model for its tokenizer alone."""
        self._fake = device
        super().__init__(spec_of(folder))

    def _place(self) -> SequenceClassifier:
        return _FakeModel(super()._place(), self._fake)
