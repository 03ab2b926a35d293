"""Faults to inject into a tiny model: forward passes that fail, ids that make no text."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deployments.engine.model_loader import LoadedModel

CLIENTS_TEXT = "what nobody but the client may read"

Fault = Callable[[list[int]], Exception | None]
"""Says of a pass's token ids why the pass fails, if it does."""


class FaultyModel:
    """Stands in for a model's `forward` and lets chosen passes fail.

    A pass fails at its end, when all its keys and values were written: that leaves the most behind.

    Attributes:
        fault: Asked at each pass.
        passes: The token ids of each pass, those that failed included.
    """

    def __init__(self, loaded: LoadedModel, fault: Fault) -> None:
        """Take the place of the model's forward."""
        self.fault = fault
        self.passes: list[list[int]] = []
        self._stock = loaded.model.forward
        loaded.model.forward = self

    def __call__(self, **inputs: Any) -> Any:
        """Run the pass, then fail if it is to."""
        token_ids = inputs["input_ids"][0].tolist()
        self.passes.append(token_ids)
        output = self._stock(**inputs)
        error = self.fault(token_ids)
        if error is not None:
            raise error
        return output


def no_fault(_: list[int]) -> None:
    """Let every pass succeed."""


def out_of_memory_above(num_tokens: int) -> Fault:
    """Let passes of more tokens fail."""

    def fault(token_ids: list[int]) -> Exception | None:
        if len(token_ids) <= num_tokens:
            return None
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return fault


def broken_by(bad_ids: Iterable[int]) -> Fault:
    """Let passes with one of these ids fail."""
    bad = frozenset(bad_ids)

    def fault(token_ids: list[int]) -> Exception | None:
        return None if bad.isdisjoint(token_ids) else IndexError("index out of range in self")

    return fault


def make_undecodable(loaded: LoadedModel, bad_ids: Iterable[int]) -> None:
    """Let the tokenizer raise on these ids, with a client's text in its message."""
    stock, bad = loaded.tokenizer.decode, frozenset(bad_ids)

    def decode(token_ids: list[int], **options: Any) -> Any:
        if not bad.isdisjoint(token_ids):
            raise OverflowError(CLIENTS_TEXT)
        return stock(token_ids, **options)

    loaded.tokenizer.decode = decode  # type: ignore[method-assign, assignment] # a fault
