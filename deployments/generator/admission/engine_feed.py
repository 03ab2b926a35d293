"""Which accepted sequences are in the engine: those whose turn it is, and some that come next.

An engine has a queue of its own, in order of arrival. While all that wait have one priority and one
tenant, that is the right order: each sequence goes into the engine at once, so that the engine
never waits for the event loop. Otherwise most wait outside, where a better one can still go first,
and only `NUM_AHEAD` are in the engine before their turn. Those that have not begun are taken out
again when another comes before them.
"""

from itertools import islice
from typing import Final

from deployments.generator.admission.run_estimate import Permit, Run, RunEstimate

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

    @property
    def num_outside(self) -> int:
        """How many accepted sequences wait outside the engine."""
        return len(self._outside)

    def add(self, permit: Permit, run: Run) -> None:
        """Add a sequence that is accepted; it goes into the engine when it is due."""
        permit.run = run
        run.note_turn(is_running=permit.is_running)
        if permit.is_running:
            run.enter(is_first=bool(self._ahead))
        else:
            self._outside[permit] = None
        self._estimate.settle()
        self.update()

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
        due, displaced = [], []
        for permit in self._estimate.take_changed():
            run = permit.run
            if run is None:
                continue
            run.note_turn(is_running=permit.is_running)
            if not permit.is_running:
                displaced.append(permit)
            elif permit in self._ahead:
                del self._ahead[permit]
            elif not run.is_in:
                due.append(permit)
        is_first = bool(self._ahead or displaced)
        if due:  # nothing that is in the engine too early may take what the others leave
            self._take_out(list(self._ahead))
        for permit in displaced:
            _run_of(permit).leave()
            self._outside[permit] = None
        for permit in due:
            self._outside.pop(permit, None)
            _run_of(permit).enter(is_first=is_first)
        self._let_in_ahead()

    def _let_in_ahead(self) -> None:
        if not self._outside and not self._ahead:
            return
        queue = self._estimate.queue
        if queue.is_uniform:
            if len(self._outside) == 1:  # the usual case; the queue need not be ordered for it
                self._add_ahead(list(self._outside))
            elif self._outside:
                self._add_ahead([permit for permit in queue if permit in self._outside])
            return
        waiting = (each for each in queue if each in self._outside or each in self._ahead)
        wanted = list(islice(waiting, NUM_AHEAD))
        ahead = list(self._ahead)
        num_kept = 0
        while num_kept < min(len(ahead), len(wanted)) and ahead[num_kept] is wanted[num_kept]:
            num_kept += 1
        self._take_out(ahead[num_kept:])
        self._add_ahead(wanted[num_kept:])

    def _add_ahead(self, permits: list[Permit]) -> None:
        for permit in permits:
            del self._outside[permit]
            self._ahead[permit] = None
            _run_of(permit).enter(is_first=False)

    def _take_out(self, permits: list[Permit]) -> None:
        for permit in permits:
            del self._ahead[permit]
            self._outside[permit] = None
            _run_of(permit).leave()


def _run_of(permit: Permit) -> Run:
    assert permit.run is not None, "only accepted sequences go into the engine"
    return permit.run
