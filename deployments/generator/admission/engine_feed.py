"""Which accepted sequences are in the engine: those whose turn it is, and some that come next.

An engine has a queue of its own, in order of arrival. While all that the replica holds have one
priority and one tenant, that is the right order: each sequence goes into the engine at once, so
that the engine never waits for the event loop. Otherwise most wait outside, where a better one can
still go first, and only `NUM_AHEAD` are in the engine before their turn. These are taken out again
when another comes before them: an engine that waits for their memory lets nobody past. One that the
engine has begun with stays, though its first delta is still on its way: it has its place already,
and its prompt would be computed twice.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

from deployments.generator.admission.permit import Permit, Run
from deployments.generator.admission.run_estimate import RunEstimate

NUM_AHEAD: Final = 2
"""Enough for the engine to begin with one in the step after another's end. Each may go before a
better one that comes then, so few are better."""


class EngineFeed:
    """Lets sequences into the engine, and out, as their turns change."""

    def __init__(self, estimate: RunEstimate) -> None:
        """Start with none.

        Args:
            estimate: Says whose turn it is.
        """
        self._estimate = estimate
        self._ahead: dict[Permit, None] = {}  # in the engine before their turn, in order
        self._outside: dict[Permit, None] = {}  # accepted, and not in the engine
        self._is_ordered = False  # whether those that are ahead are so in the order of their claims

    @property
    def num_outside(self) -> int:
        """How many accepted sequences wait outside the engine."""
        return len(self._outside)

    def add(self, permit: Permit, run: Run) -> None:
        """Add a sequence that is accepted; it goes into the engine when it is due."""
        permit.run = run
        self._outside[permit] = None
        self._estimate.settle()
        self._follow([permit, *self._estimate.take_changed()])

    def drop(self, permit: Permit) -> None:
        """Take a sequence out for good."""
        self._ahead.pop(permit, None)
        self._outside.pop(permit, None)
        if permit.run is not None:
            permit.run.leave()
            permit.run = None

    def note_begun(self, permit: Permit) -> None:
        """Note that the engine has begun with a sequence, whether or not it was its turn."""
        if permit in self._ahead:
            del self._ahead[permit]
            self.update()

    def update(self) -> None:
        """Let sequences in and out, by the turns that have changed."""
        self._follow(self._estimate.take_changed())

    def _follow(self, changed: Iterable[Permit]) -> None:
        due = []
        for permit in dict.fromkeys(changed):
            run = permit.run
            if run is None:
                continue
            run.note_turn(is_running=permit.is_running)
            if not permit.is_running:
                run.leave()
                self._ahead.pop(permit, None)
                self._outside[permit] = None
            elif not self._is_in_place(permit, run):
                due.append(permit)
        self._let_in(due)
        self._let_in_ahead()

    def _is_in_place(self, permit: Permit, run: Run) -> bool:
        """Return whether a sequence that is due is in the engine, behind none that is not."""
        if permit not in self._ahead:
            return run.is_in
        is_next = self._estimate.is_of_one_kind or permit is next(iter(self._ahead))
        if not is_next and not run.has_begun:
            return False
        del self._ahead[permit]
        return True

    def _let_in(self, due: list[Permit]) -> None:
        if not due:
            return
        has_displaced = any(each.num_displaced for each in self._ahead)
        if has_displaced or not self._estimate.is_of_one_kind:
            self._take_out(list(self._ahead))  # they would hold up those that are due
        for permit in due:
            self._outside.pop(permit, None)
            if not _run_of(permit).is_in:
                _run_of(permit).enter(goes_first=permit.is_resumed)

    def _let_in_ahead(self) -> None:
        if not self._outside and not self._ahead:
            return
        was_ordered, self._is_ordered = self._is_ordered, not self._estimate.is_of_one_kind
        if self._is_ordered:
            self._order_ahead(NUM_AHEAD)
        elif was_ordered:
            self._order_ahead(None)
        else:
            for permit in list(self._outside):
                self._add_ahead(permit, goes_first=permit.is_resumed)

    def _order_ahead(self, most: int | None) -> None:
        """Have the next few, or all, in the engine, in order, behind all that are due."""
        for permit in [each for each in self._ahead if _run_of(each).has_begun]:
            del self._ahead[permit]  # it has its place, so another may be ahead
        queue = self._estimate.queue
        waiting = (each for each in queue if each in self._outside or each in self._ahead)
        wanted = list(islice(waiting, most))
        ahead = list(self._ahead)
        num_kept = 0
        while num_kept < min(len(ahead), len(wanted)) and ahead[num_kept] is wanted[num_kept]:
            num_kept += 1
        self._take_out(ahead[num_kept:])
        for permit in wanted[num_kept:]:
            if permit in self._outside:  # else the engine has begun with it
                self._add_ahead(permit, goes_first=False)

    def _add_ahead(self, permit: Permit, *, goes_first: bool) -> None:
        del self._outside[permit]
        self._ahead[permit] = None
        _run_of(permit).enter(goes_first=goes_first)

    def _take_out(self, permits: list[Permit]) -> None:
        for permit in permits:
            del self._ahead[permit]
            if not _run_of(permit).has_begun:
                self._outside[permit] = None
                _run_of(permit).leave()


def _run_of(permit: Permit) -> Run:
    assert permit.run is not None, "only accepted sequences go into the engine"
    return permit.run
