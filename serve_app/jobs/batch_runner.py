"""Runs batches: claims those that no ingress runs, and lets `BatchRun` run them.

A batch whose lease is lost, or whose store fails, is dropped at once and claimed again later, by
whichever ingress comes first; what has a result by then does not run again.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from deployments.contract.errors import JobsUnavailableError
from serve_app.config import LimitsConfig
from serve_app.jobs.batch import Batch, Status
from serve_app.jobs.batch_run import BatchRun, Meter
from serve_app.jobs.calls import AskRoute, StandingOf
from serve_app.jobs.jobs import Jobs, again_and_again

POLL_S: Final = 1.0
"""How often leases are renewed, and batches of other ingresses looked for."""

EXPIRE_S: Final = 60.0
"""How often what is too old is erased."""

MAX_RUNNING: Final = 8
"""Batches that an ingress runs at once; further ones wait for their turn."""

MAX_ENDING: Final = 8
"""Batches that it ends beside them: their lines need not run any more, so they don't wait."""

TURN_S: Final = 300.0
"""How long a batch keeps its place when one of an owner without any waits."""

logger = logging.getLogger("ray.serve")


@dataclass(slots=True)
class _Run:
    """A batch that this ingress runs.

    Attributes:
        task: Runs it.
        batch: The batch when its lease was renewed last.
        began_s: When this ingress claimed it, by the monotonic clock.
        stopped: Set when its lines shall run no more.
        yielding: Set when no further lines shall begin.
        heir: The owner for whom it makes room; None while it keeps its place.
    """

    task: asyncio.Task[None]
    batch: Batch
    began_s: float
    stopped: asyncio.Event
    yielding: asyncio.Event
    heir: str | None = None


class BatchRunner:
    """Runs batches while its ingress lives."""

    def __init__(
        self,
        jobs: Jobs,
        limits: LimitsConfig,
        ask: AskRoute,
        standing_of: StandingOf,
        meter: Meter,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        """Set what it runs with.

        Args:
            jobs: The batches.
            limits: Bounds each line as a request's body.
            ask: Asks a route.
            standing_of: See `StandingOf`.
            meter: Counts lines.
            poll_s: How often to look for batches.
        """
        self._jobs = jobs
        self._meter = meter
        self._poll_s = poll_s
        self._name = secrets.token_hex(8)
        self._runs: dict[str, _Run] = {}
        self._vacated: dict[str, _Run] = {}
        self._batch_run = BatchRun(jobs, self._name, limits, ask, standing_of, meter)
        self._litter = asyncio.Event()

    async def run(self) -> None:
        """Run batches until this is cancelled; then leave them to other ingresses at once."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(
                    again_and_again("batches", self._turn, self._jobs.wait, self._poll_s)
                )
                tasks.create_task(
                    again_and_again("batches", self._clean, self._wait_for_litter, EXPIRE_S)
                )
        finally:
            runs = [run.task for run in self._runs.values()]
            for task in runs:
                task.cancel()
            await asyncio.gather(*runs, return_exceptions=True)
            with suppress(JobsUnavailableError):
                await self._jobs.batches.leases.release(self._name)

    async def _clean(self) -> None:
        """Erase what is too old, or in a file by now; beside the turns, since it may take long."""
        await self._jobs.results.erase_ended()
        await self._jobs.files.expire()
        await self._jobs.batches.expire()

    async def _wait_for_litter(self, most_s: float) -> None:
        """Return when a batch has ended here, or after some seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._litter.wait()
        self._litter.clear()

    async def _turn(self) -> None:
        """Renew leases, stop what is cancelled or due, and claim what is free."""
        now_s = self._jobs.store.unix_s()
        if self._runs:
            numbers = [run.batch.number for run in self._runs.values()]
            rows = await self._jobs.batches.leases.renew(self._name, numbers)
            held = {row["id"]: Batch.of(row) for row in rows}
            for id_, run in list(self._runs.items()):
                if (batch := held.get(id_)) is None:
                    run.task.cancel()
                    continue
                run.batch = batch
                if batch.status is Status.CANCELLING or batch.due_s <= now_s:
                    run.stopped.set()
        await self._hand_over()
        while (num_taken := len(self._owners)) < MAX_RUNNING + MAX_ENDING:
            if not await self._claim(only_ending=num_taken >= MAX_RUNNING):
                break
        if len(self._owners) >= MAX_RUNNING:
            await self._make_room()

    async def _claim(self, *, only_ending: bool = False, only_of: str | None = None) -> bool:
        """Start a batch that no ingress runs; return whether there was one."""
        claimed = await self._jobs.batches.claim(
            self._name, self._owners, only_ending=only_ending, only_of=only_of
        )
        if claimed is not None:
            self._start(claimed)
        return claimed is not None

    @property
    def _owners(self) -> dict[str, str]:
        """The owners of the places here, by the batches' ids.

        The place of a batch that makes room is its heir's already.
        """
        return {
            id_: run.batch.owner if run.heir is None else run.heir
            for id_, run in (self._runs | self._vacated).items()
        }

    async def _make_room(self) -> None:
        """Let a batch yield its place to one of an owner who has fewer of the places here.

        That is at once while the places are uneven, though its lines may take a while to stop: the
        turn does not wait for them, since it renews the leases of the others, too. With an owner
        more than there are places, each has its turn, and one that is over finishes the lines that
        run: they may take longer than a turn, and would never have results otherwise.
        """
        owners = self._owners
        counts = Counter(owners.values())
        waiting = await self._jobs.batches.waiting(owners)
        most = max(counts.values())
        if not waiting or most <= counts[waiting[0]]:
            return
        yielding = [
            (run.began_s, id_, run)
            for id_, run in self._runs.items()
            if counts[owners[id_]] == most
            and run.heir is None
            and run.batch.status is Status.IN_PROGRESS
        ]
        if most == counts[waiting[0]] + 1:
            self._end_a_turn(len(waiting), [run for _, _, run in sorted(yielding)])
        elif yielding:
            _, _, run = max(yielding)  # the latest has done the least
            run.heir = waiting[0]
            run.task.cancel()

    async def _hand_over(self) -> None:
        """Give back the batches that made room and have stopped, and start one of each heir."""
        while self._vacated:
            _, run = self._vacated.popitem()
            await self._jobs.batches.leases.give_back(self._name, run.batch.number)
            await self._claim(only_of=run.heir)

    def _end_a_turn(self, num_waiting: int, runs: Sequence[_Run]) -> None:
        """Let the batch yield that has run for the longest, if as many wait as yield already.

        Args:
            num_waiting: The owners who wait for a place.
            runs: What may yield, the first that began first.
        """
        if sum(run.yielding.is_set() for run in self._runs.values()) >= num_waiting:
            return
        for run in runs:
            if not run.yielding.is_set() and time.monotonic() - run.began_s >= TURN_S:
                run.yielding.set()
                return

    def _start(self, batch: Batch) -> None:
        stopped, yielding = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(self._batch_run.run(batch, stopped, yielding))
        self._runs[batch.id] = _Run(task, batch, time.monotonic(), stopped, yielding)
        self._meter.running_batches(len(self._runs))

        def ended(task: asyncio.Task[None]) -> None:
            run = self._runs.pop(batch.id)
            if run.heir is not None:
                self._vacated[batch.id] = run
            self._meter.running_batches(len(self._runs))
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("batch %s has failed here", batch.id, exc_info=error)
            self._litter.set()
            self._jobs.announce()

        task.add_done_callback(ended)
