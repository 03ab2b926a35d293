"""Asks every replica of a model for its report, and waits for none that is silent.

The call goes to all replicas at once (`handle.broadcast`), past their queues, and makes Serve start
none. It counts as no use of the model.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from deployments.plan.replica_report import ReplicaReport
from serve_app.backends.replicas.handles import Handle, ask_all
from serve_app.backends.replicas.running_replicas import RunningReplicas

TIMEOUT_S: Final = 2.0
"""How long the replicas of a model have to answer. A report takes a millisecond, and the event loop
that makes it is never busy for long, so one that takes longer is silent."""


@dataclass(frozen=True, slots=True)
class Reports:
    """What the replicas of a model have answered.

    Attributes:
        reports: The answers, by replica id.
        silent: The ids of the others that run.
        num_started: Replicas that have run since this ingress began to look.
    """

    reports: tuple[ReplicaReport, ...] = ()
    silent: tuple[str, ...] = ()
    num_started: int = 0


AskReplicas = Callable[[bool], Coroutine[Any, Any, Reports]]
"""Asks the running replicas of a model, given whether Serve's controller says that any runs.

It ends within a few seconds and raises nothing.
"""


class HandleReports:
    """Asks the replicas behind a handle."""

    def __init__(
        self, handle: Handle, running: RunningReplicas, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Wrap a model's handle.

        Args:
            handle: The handle.
            running: The model's replicas, by which those that are silent are known.
            timeout_s: How long they have to answer.
        """
        self._handle = handle
        self._running = running
        self._timeout_s = timeout_s

    async def ask(self, is_any_running: bool) -> Reports:
        """Ask each replica that runs; see `AskReplicas`.

        Args:
            is_any_running: What the controller says; the router may be the first to know of one.
        """
        running = self._running.ids
        answers: Sequence[object] = ()
        if is_any_running or running:
            answers = await ask_all(self._handle, "inspect", self._timeout_s)
        found = [each for each in answers if isinstance(each, ReplicaReport)]
        silent = running - {report.replica_id for report in found}
        return Reports(
            tuple(sorted(found, key=lambda report: report.replica_id)),
            tuple(sorted(silent)),
            self._running.num_seen,
        )
