"""Faults to inject into a tiny model: forward passes that fail, ids that can't be decoded."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from deployments.engine.model.loader import LoadedModel

CLIENTS_TEXT = "text that only the client may read"

Fault = Callable[[list[int]], Exception | None]
"""Maps a pass's token ids to the error that it raises, or None."""


class FaultyModel:
    """Stands in for a model's `forward` and makes chosen passes fail.

    A pass fails at its end, after writing all its keys and values, which leaves the most behind.
    """

    def __init__(self, loaded: LoadedModel, fault: Fault) -> None:
        """Replace the model's `forward`."""
        self.fault = fault  # called at each pass
        self.passes: list[list[int]] = []  # the token ids of each pass, including failed ones
        self._stock = loaded.model.forward
        loaded.model.forward = self

    def __call__(self, **inputs: Any) -> Any:
        """Run the pass, then raise its fault, if any."""
        token_ids = inputs["input_ids"][0].tolist()
        self.passes.append(token_ids)
        output = self._stock(**inputs)
        error = self.fault(token_ids)
        if error is not None:
            raise error
        return output


def no_fault(_: list[int]) -> None:
    """Make every pass succeed."""


def out_of_memory_above(num_tokens: int) -> Fault:
    """Make passes of more tokens run out of memory."""

    def fault(token_ids: list[int]) -> Exception | None:
        if len(token_ids) <= num_tokens:
            return None
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    return fault


def broken_by(bad_ids: Iterable[int]) -> Fault:
    """Make passes with one of these ids fail."""
    bad = frozenset(bad_ids)

    def fault(token_ids: list[int]) -> Exception | None:
        return None if bad.isdisjoint(token_ids) else IndexError("index out of range in self")

    return fault


def make_undecodable(loaded: LoadedModel, bad_ids: Iterable[int]) -> None:
    """Make the tokenizer raise on these ids, with a client's text in the message."""
    stock, bad = loaded.tokenizer.decode, frozenset(bad_ids)

    def decode(token_ids: list[int], **options: Any) -> Any:
        if not bad.isdisjoint(token_ids):
            raise OverflowError(CLIENTS_TEXT)
        return stock(token_ids, **options)

    loaded.tokenizer.decode = decode  # type: ignore[method-assign, assignment] # a fault
