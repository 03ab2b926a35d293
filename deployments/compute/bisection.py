"""Finds the items that make a batch fail.

`run` is called with all items. If it raises, halves of the failing batch are run until one item is
left. An item counts as a failure only if it raises when run by itself, so an error that needs
several items together fails none of them. Every other item is in exactly one run that passed.

One bad item among n costs at most log2(n) + 2 more runs: the halves that were not run on the way
are run together at the end.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from deployments.compute.device_errors import is_fatal, is_out_of_memory

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Failure(Generic[Item]):
    """An item that failed when run by itself.

    Attributes:
        item: The item.
        is_out_of_memory: Whether it ran out of memory.
    """

    item: Item
    is_out_of_memory: bool


class Bisection(Generic[Item, Result]):
    """Runs items in batches, and isolates those that fail.

    Attributes:
        ran: Batches that passed, each with its result, in order.
        failures: Items that failed when run by themselves.
    """

    def __init__(self, name: str, run: Callable[[tuple[Item, ...]], Result]) -> None:
        """Prepare to run items.

        Args:
            name: What the run is called in the log.
            run: Runs a batch of items. After it raised, it is called again with parts of the batch.
        """
        self._name = name
        self._run = run
        self.ran: list[tuple[tuple[Item, ...], Result]] = []
        self.failures: list[Failure[Item]] = []

    def run(self, items: Iterable[Item]) -> None:
        """Run all items: each ends up in one batch of `ran` or in `failures`.

        Raises:
            torch.AcceleratorError: The device is lost; no item is at fault.
        """
        untried = tuple(items)
        while untried and not self._attempt(untried):
            untried = self.search(untried)

    def search(self, suspects: tuple[Item, ...]) -> tuple[Item, ...]:
        """Narrow a batch that failed down to one item, and run that item by itself.

        Returns:
            Items still to be run.
        """
        untried: tuple[Item, ...] = ()
        has_failed = True
        while len(suspects) > 1:
            half = len(suspects) // 2
            has_failed = not self._attempt(suspects[:half])
            if has_failed:
                suspects, untried = suspects[:half], suspects[half:] + untried
            else:
                suspects = suspects[half:]
        if not has_failed:
            self._attempt(suspects)
        return untried

    def _attempt(self, items: tuple[Item, ...]) -> bool:
        """Run a batch; keep its result, or the failure if it is a single item."""
        try:
            self.ran.append((items, self._run(items)))
        except Exception as error:  # any error may fail only one item
            if is_fatal(error):
                raise
            is_single = len(items) == 1
            logger.warning(
                "%s failed for a batch of %d", self._name, len(items), exc_info=is_single
            )
            if is_single:
                self.failures.append(Failure(items[0], is_out_of_memory(error)))
            return False
        return True
