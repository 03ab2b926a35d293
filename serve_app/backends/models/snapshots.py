"""The metrics of all processes, as `GET /metrics` shows them.

A question goes to all running replicas of each model and to all ingresses, at most once a second. A
replica that does not answer in time is shown as it was last. The last replicas of a model that has
none now are, too: with their counters, since a sum over live replicas would fall, but without their
load. Several ingresses tell each other what they remember, so that all show the same.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

from deployments.contract.telemetry.metric_store import Snapshot
from deployments.contract.telemetry.metric_table import LOAD, OF_LIVE
from serve_app.backends.models.single_flight import Remembered
from serve_app.backends.replicas.running_replicas import RunningReplicas

MEMORY_S: Final = 1.0
"""How long an answer is passed on, whatever the number of scrapers."""

PATIENCE_S: Final = 1.0
"""How long the replicas of one kind have to answer."""

ALONE_S: Final = 10.0
"""How long an ingress that has found no other one does not look again: that costs as much as asking
a replica. The series of a new ingress begin near zero, so they are missed little."""

Ask = Callable[[], Awaitable[Sequence[object]]]
"""Asks all running replicas of a deployment; returns the answers that came in time."""


@dataclass(frozen=True, slots=True)
class IngressReport:
    """What an ingress tells the others.

    Attributes:
        own: Its own metrics.
        remembered: The last replicas of models that have none now, by the model's id.
    """

    own: Snapshot
    remembered: Mapping[str, tuple[Snapshot, ...]]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where the metrics of a model's replicas come from.

    Attributes:
        ask: Returns `Snapshot`s.
        replicas: The replicas that run; None if nothing tells, and then those that answer do.
    """

    ask: Ask
    replicas: RunningReplicas | None

    @property
    def is_cold(self) -> bool:
        """Whether no replica is known to run."""
        return self.replicas is not None and not self.replicas.has_any

    def is_running(self, replica_id: str) -> bool:
        """Return whether a replica is known to run."""
        return self.replicas is not None and self.replicas.is_running(replica_id)


async def _nobody() -> Sequence[object]:
    return ()


class Snapshots:
    """The metrics of all processes, at most `MEMORY_S` old."""

    def __init__(
        self,
        own: Callable[[], Snapshot],
        models: Mapping[str, ModelSource] | None = None,
        ask_ingresses: Ask = _nobody,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without knowledge.

        Args:
            own: Returns the metrics of this ingress.
            models: The models, by id.
            ask_ingresses: Returns an `IngressReport` of each ingress.
            now_s: Returns the time of a monotonic clock, in seconds.
        """
        self._own = own
        self._models = models or {}
        self._ask_ingresses = ask_ingresses
        self._now_s = now_s
        self._looks_at_s = 0.0  # for other ingresses
        self._last: dict[str, tuple[Snapshot, ...]] = {}
        self._all = Remembered(self._collect, MEMORY_S, now_s)

    async def all(self) -> tuple[Snapshot, ...]:
        """Return the metrics of all processes, in the order of their deployments and replicas."""
        return await self._all.result()

    def report(self) -> IngressReport:
        """Return what this ingress tells the others."""
        remembered = {id_: each for id_, each in self._last.items() if self._models[id_].is_cold}
        return IngressReport(self._own(), remembered)

    async def _collect(self) -> tuple[Snapshot, ...]:
        others = asyncio.ensure_future(self._others())
        await asyncio.gather(others, *(self._ask(id_) for id_ in self._models))
        ingresses = [self._own()]
        for report in others.result():
            ingresses.append(report.own)
            for id_, remembered in report.remembered.items():
                self._learn(id_, remembered)
        models = (each for id_ in self._models for each in self._shown(id_))
        return tuple(
            sorted((*ingresses, *models), key=lambda each: (each.deployment, each.replica))
        )

    async def _others(self) -> Sequence[IngressReport]:
        """Return the reports of the other ingresses."""
        now_s = self._now_s()
        if now_s < self._looks_at_s:
            return ()
        reports = cast("Sequence[IngressReport]", await self._ask_ingresses())
        others = [each for each in reports if each.own.replica != self._own().replica]
        self._looks_at_s = 0.0 if others else now_s + ALONE_S
        return others

    async def _ask(self, model_id: str) -> None:
        """Renew what is known about a model, unless none of its replicas runs."""
        source = self._models[model_id]
        if source.is_cold:
            return
        answers = cast("Sequence[Snapshot]", await source.ask())
        known = {each.replica: each for each in self._last.get(model_id, ())}
        silent = {id_: each for id_, each in known.items() if source.is_running(id_)}
        found = silent | {each.replica: each for each in answers}
        if found:
            self._last[model_id] = tuple(found.values())

    def _learn(self, model_id: str, remembered: tuple[Snapshot, ...]) -> None:
        """Take over what another ingress remembers, if it is newer."""
        if model_id in self._models and self._models[model_id].is_cold:
            known = self._last.get(model_id, ())
            self._last[model_id] = max(known, remembered, key=_newest_s)

    def _shown(self, model_id: str) -> tuple[Snapshot, ...]:
        last = self._last.get(model_id, ())
        return tuple(map(_without_load, last)) if self._models[model_id].is_cold else last


def _newest_s(snapshots: tuple[Snapshot, ...]) -> float:
    return max((each.taken_s for each in snapshots), default=0.0)


def _without_load(snapshot: Snapshot) -> Snapshot:
    """Return the metrics of a replica that is gone: it holds nothing, and measures nothing."""
    left = {
        name: tuple((labels, (0.0,)) for labels, _ in series) if name in LOAD else series
        for name, series in snapshot.series.items()
        if name not in OF_LIVE
    }
    return replace(snapshot, series=left)
