"""A pass that runs as a trace, and the one way to find a trace that computes what the model does.

A trace that lies on disk is tried first, then one that is made now, then the same without fused
operators. What a pass computes, and how results are compared, is the caller's.
"""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

from deployments.compute.traced_model.kept_trace import KeptTrace, Trace

logger = logging.getLogger(__name__)


class TracedPass:
    """A pass that runs as a trace, with fused operators where there are any.

    Attributes:
        was_kept: Whether the trace is one that an earlier start has kept on disk.
    """

    def __init__(
        self, make: Callable[[], Trace], place: KeptTrace | None, *, reads_kept: bool
    ) -> None:
        """Take the trace that is on disk, or make it.

        Args:
            make: Traces the pass.
            place: Where the trace is kept, on a CPU; None keeps none.
            reads_kept: Whether a trace that is on disk may be used.
        """
        found = place.read() if place is not None and reads_kept else None
        self.was_kept = found is not None
        self._place = None if self.was_kept else place
        if found is None:
            found = make()
            if place is not None:
                found = place.prepare(found)
        self._graph, self._fused, self._notes = found.plain, found.fused, found.notes
        if place is not None:
            # Imported here: kernels need llvmlite, which a machine with a GPU may lack.
            from deployments.compute.cpu.linear.small_batch_linear import use_small_batch_linear

            for graph in filter(None, (self._graph, self._fused)):
                use_small_batch_linear(graph)

    @property
    def is_fused(self) -> bool:
        """Whether fused operators are in use."""
        return self._fused is not None

    def unfuse(self) -> bool:
        """Use only torch's operators from now on; return whether fused ones were in use."""
        was_fused, self._fused = self.is_fused, None
        return was_fused

    def keep(self) -> None:
        """Keep the trace on disk for later starts, unless it is there or can't be kept."""
        if self._place is not None:
            self._place.write()
            self._place = None  # it knows all tensors of the model


Pass = TypeVar("Pass", bound=TracedPass)
Opened = TypeVar("Opened", bound=TracedPass, covariant=True)


class OpenPass(Protocol[Opened]):
    """Opens a pass; see `TracedPass` for `reads_kept`."""

    def __call__(self, *, reads_kept: bool) -> Opened:
        """Take the trace that is on disk if that may be read, or make it.

        Raises:
            NotTraceableError: The model can't be traced.
        """
        ...


def find_faithful(
    open_pass: OpenPass[Pass], is_faithful: Callable[[Pass], bool], results: str
) -> Pass | None:
    """Return a pass that gives a model's own results; None if no trace does.

    A trace that was made now and is faithful is kept for later starts.

    Args:
        open_pass: Opens the pass.
        is_faithful: Runs a pass, and returns whether its results are the model's. What it raises
            for a trace that was made now is raised here.
        results: What the pass gives, for the log.

    Raises:
        NotTraceableError: The model can't be traced.
    """
    traced = open_pass(reads_kept=True)
    if traced.was_kept:
        try:
            if is_faithful(traced):
                return traced
            logger.warning("the trace on disk gives other %s; the model is traced again", results)
        except Exception:  # the file may name operators that do not fit each other
            logger.warning("the trace on disk fails; the model is traced again", exc_info=True)
        traced = open_pass(reads_kept=False)
    if is_faithful(traced):
        traced.keep()
        return traced
    if traced.unfuse() and is_faithful(traced):
        logger.warning("operators are not fused: the %s would differ", results)
        return traced
    return None
