"""Since when a tenant has waited at an ingress, which a replica alone can't know."""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from itertools import count


class Backlogs:
    """The times for which tenants have had requests at an ingress that waited for their answers.

    Attributes:
        numbers: The number of a tenant's, as long as it lasts; by tenant.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self.numbers: dict[str, int] = {}
        self._num_waiting: Counter[str] = Counter()
        self._next = count(1)

    def enter(self, tenant: str) -> Callable[[], None]:
        """Note that a request begins to wait; call what is returned once it no longer does."""
        if not self._num_waiting[tenant]:
            self.numbers[tenant] = next(self._next)
        self._num_waiting[tenant] += 1
        waiting = ExitStack()
        waiting.callback(self._leave, tenant)
        return waiting.close  # leaves once, however often it is called

    def _leave(self, tenant: str) -> None:
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            del self._num_waiting[tenant], self.numbers[tenant]
