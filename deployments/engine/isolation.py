"""Finding the items that make a joint run fail.

`run` is called with all items. If that raises, halves of what is known to fail are run until one
item is left. An item is blamed only if it raises when it runs alone, so an error that needs several
together blames none. Each item that is not blamed is in exactly one run that passed.

One bad item among n costs at most log2(n) + 2 more runs: the half that is known to be sound by then
waits and is run at the end, all of it together.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from deployments.engine.device_errors import is_fatal, is_out_of_memory

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Blame(Generic[Item]):
    """An item that failed when it ran alone.

    Attributes:
        item: The item.
        is_out_of_memory: Whether it failed for want of memory.
    """

    item: Item
    is_out_of_memory: bool


class Isolation(Generic[Item, Result]):
    """What became of a number of items.

    Attributes:
        ran: Items that ran together, with their result, in the order of the runs.
        blamed: Items that failed alone.
    """

    def __init__(self, name: str, run: Callable[[tuple[Item, ...]], Result]) -> None:
        """Prepare.

        Args:
            name: What runs, for the log.
            run: Runs items together; it may be called again with those of a run that raised.
        """
        self._name = name
        self._run = run
        self.ran: list[tuple[tuple[Item, ...], Result]] = []
        self.blamed: list[Blame[Item]] = []

    def run(self, items: Iterable[Item]) -> None:
        """Run all items that can be run.

        Raises:
            torch.AcceleratorError: The device is gone; no item is to blame.
        """
        untried = tuple(items)
        while untried and not self._attempt(untried):
            untried = self.search(untried)

    def search(self, suspects: tuple[Item, ...]) -> tuple[Item, ...]:
        """Narrow down items that failed together to one, and run that alone.

        Returns:
            Items that are still to be run.
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
        """Run items together; keep what came of it, or the blame if there is but one."""
        try:
            self.ran.append((items, self._run(items)))
        except Exception as error:  # whatever it is, it must end one sequence, not all
            if is_fatal(error):
                raise
            is_alone = len(items) == 1
            logger.warning("%s failed for %d together", self._name, len(items), exc_info=is_alone)
            if is_alone:
                self.blamed.append(Blame(items[0], is_out_of_memory(error)))
            return False
        return True
