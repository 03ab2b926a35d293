"""Runs one level of a sweep: its warm-up, its load, and its end at the deadline."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import nullcontext
from itertools import chain, islice, takewhile
from typing import Any

from loadtest.client.attempt import Task
from loadtest.client.clock import Clock
from loadtest.client.sender import Sender
from loadtest.load.loop_lag import LagMeter
from loadtest.load.plan import LevelPlan, arrivals_s
from loadtest.load.question_sampler import QuestionSampler
from loadtest.load.stop import Stop, wait_at_most
from loadtest.results.record import LevelRecord, RequestRecord


class Level:
    """Runs a plan once."""

    def __init__(
        self,
        plan: LevelPlan,
        sender: Sender,
        sampler: QuestionSampler,
        stop: Stop,
        clock: Clock,
        keep: Callable[[RequestRecord], None],
    ) -> None:
        """Prepare the level; `keep` is called with each record as its request ends."""
        self._plan = plan
        self._sender = sender
        self._sampler = sampler
        self._stop = stop
        self._clock = clock
        self._keep = keep
        self._num_made = 0
        self._num_unsent = 0
        self._deadline_s: float | None = None
        self._sending: set[asyncio.Task[None]] = set()
        slots = plan.max_inflight
        self._slots = asyncio.Semaphore(slots) if slots is not None else None

    async def run(self, report: Callable[[LevelRecord], None]) -> LevelRecord:
        """Send all requests and wait for them to end.

        Args:
            report: Called with the level's record so far when it begins, and when its load begins.
        """
        plan = self._plan
        started_s = self._clock()
        record = LevelRecord(
            index=plan.index,
            repeat=plan.repeat,
            num_queues=plan.num_queues,
            rate_per_s=plan.rate_per_s,
            started_s=started_s,
            warm_s=started_s,
            ended_s=started_s,
        )
        report(record)
        with LagMeter() as lag:
            await self._in_time(self._warm_up)
            record = record.model_copy(update=self._begin_load())
            report(record)
            await self._in_time(self._closed_loop if plan.rate_per_s is None else self._open_loop)
        return record.model_copy(
            update={
                "ended_s": self._clock(),
                "lag_ms": tuple(lag.lag_ms),
                "cpu_share": lag.cpu_share,
                "num_unsent": self._num_unsent,
                "was_stopped": self._stop.draining.is_set(),
            }
        )

    def _begin_load(self) -> dict[str, float | None]:
        """Set the deadline; return the record's fields that are now known."""
        now_s = self._clock()
        if self._plan.duration_s is not None:
            self._deadline_s = now_s + self._plan.duration_s
        return {"warm_s": now_s + self._plan.ramp_s, "deadline_s": self._deadline_s}

    async def _in_time(
        self, load: Callable[[asyncio.TaskGroup], Coroutine[Any, Any, None]]
    ) -> None:
        """Run a load; cancel the requests still in flight when the grace period ends."""
        cutting_off = asyncio.ensure_future(self._cut_off())
        try:
            async with asyncio.TaskGroup() as group:
                await load(group)
        finally:
            cutting_off.cancel()

    async def _cut_off(self) -> None:
        await wait_at_most(self._stop.draining, self._left_s())
        await wait_at_most(self._stop.aborted, self._plan.grace_s)
        for sending in self._sending:
            sending.cancel()

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - self._clock()

    def _is_over(self) -> bool:
        left_s = self._left_s()
        return self._stop.draining.is_set() or (left_s is not None and left_s <= 0)

    async def _pause(self, seconds: float) -> None:
        """Wait, but not beyond the deadline or a stop."""
        left_s = self._left_s()
        await wait_at_most(self._stop.draining, seconds if left_s is None else min(seconds, left_s))

    def _start(self, group: asyncio.TaskGroup, sending: Coroutine[Any, Any, None]) -> None:
        task = group.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, task: Task) -> None:
        self._keep(await self._sender.send(task))

    def _task(self, **given: Any) -> Task:
        index = self._num_made
        self._num_made += 1
        question, call = self._sampler.next_call(self._plan.index, index)
        return Task(level=self._plan.index, index=index, question=question, call=call, **given)

    async def _warm_up(self, group: asyncio.TaskGroup) -> None:
        self._start(group, self._send_warmups())

    async def _send_warmups(self) -> None:
        queue = None if self._plan.num_queues is None else 0
        for _ in range(self._plan.num_warmups):
            if self._is_over():
                return
            await self._send(self._task(queue=queue, is_warmup=True))

    async def _closed_loop(self, group: asyncio.TaskGroup) -> None:
        num_queues = self._plan.num_queues or 0
        for queue in range(num_queues):
            self._start(group, self._run_queue(queue, self._plan.ramp_s * queue / num_queues))

    async def _run_queue(self, queue: int, delay_s: float) -> None:
        if delay_s:
            await self._pause(delay_s)
        num_sent = 0
        while self._plan.num_loops is None or num_sent < self._plan.num_loops:
            if num_sent and self._plan.interval_s:
                await self._pause(self._plan.interval_s)
            async with self._slots or nullcontext():
                if self._is_over() or self._has_sent_all():
                    return
                num_sent += 1
                await self._send(self._task(queue=queue))

    def _has_sent_all(self) -> bool:
        num_requests = self._plan.num_requests
        num_made = self._num_made - self._plan.num_warmups
        return num_requests is not None and num_made >= num_requests

    async def _open_loop(self, group: asyncio.TaskGroup) -> None:
        arrivals_s = self._arrivals_s()
        for due_s in arrivals_s:
            if not await self._until(due_s):
                return
            if self._slots is not None:
                await self._slots.acquire()
            if self._is_over():
                self._num_unsent = self._num_missed(due_s, arrivals_s)
                return
            self._start(group, self._send_scheduled(self._task(scheduled_s=due_s)))

    def _arrivals_s(self) -> Iterator[float]:
        plan, started_s = self._plan, self._clock()
        assert plan.rate_per_s is not None
        due_s = arrivals_s(
            plan.rate_per_s, self._sampler.rng, is_poisson=plan.is_poisson, ramp_s=plan.ramp_s
        )
        return (started_s + after_s for after_s in islice(due_s, plan.num_requests))

    def _num_missed(self, due_s: float, later_s: Iterator[float]) -> int:
        """Count the requests due before the deadline that were not sent for lack of a free slot."""
        if self._stop.draining.is_set() or self._deadline_s is None:
            return 0
        deadline_s = self._deadline_s
        return sum(1 for _ in takewhile(lambda due: due < deadline_s, chain([due_s], later_s)))

    async def _until(self, due_s: float) -> bool:
        """Wait until a request is due; return whether to send it."""
        if self._deadline_s is not None and due_s >= self._deadline_s:
            await self._pause(due_s - self._clock())
            return False
        # The loop's timers have a resolution of a millisecond and may fire early.
        while (left_s := due_s - self._clock()) > 0 and not self._stop.draining.is_set():
            await self._pause(left_s)
        return not self._stop.draining.is_set()

    async def _send_scheduled(self, task: Task) -> None:
        try:
            await self._send(task)
        finally:
            if self._slots is not None:
                self._slots.release()
