"""Runs responses in the background: claims those that no ingress runs, and logs their events.

What a response says is the surface's business; here are its lease and its log. All that running
responses have said within `FLUSH_S` goes into one transaction: a disk that syncs each of them for
itself would be the limit of the server. No client reads what is not logged yet.

A response whose lease is lost, or whose store fails, is dropped at once. The ingress that claims it
next goes on behind what is logged.
"""

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from deployments.contract.errors import JobsUnavailableError
from serve_app.jobs.batch_run import MAX_WAIT_S
from serve_app.jobs.calls import Call, CallAnswer, StandingOf
from serve_app.jobs.jobs import Jobs, again_and_again
from serve_app.jobs.leases import LeaseLostError
from serve_app.jobs.response_log import End, Entry, Group
from serve_app.jobs.responses import StoredResponse

POLL_S: Final = 0.5
"""How often leases are renewed, responses that others have cancelled are noticed, and those of dead
ingresses are looked for."""

EXPIRE_S: Final = 60.0
"""How often what is too old is erased."""

FLUSH_S: Final = 0.05
"""How long the first event of a group waits for others."""

PATH: Final = "/v1/responses"
"""The route that a response in the background stands in the access log with."""

logger = logging.getLogger("ray.serve")

Work = Callable[[], Awaitable[None]]
RunWork = Callable[[Call, Work], Awaitable[CallAnswer]]
"""Does work as the request that a call stands for; an error of it becomes the answer's status."""


class RunLog:
    """What one running response adds to its log.

    Attributes:
        number: The response's.
        id: The response's.
        num_events: How many events it has, those included that wait for the next flush.
        has_ended: Whether its end is in the store.
        is_broken: Whether something could not be logged, so that nothing may follow.
    """

    def __init__(
        self,
        response: StoredResponse,
        groups: list[Group],
        schedule: Callable[["RunLog"], None],
        drop: Callable[[], object],
    ) -> None:
        """Go on with a log.

        Args:
            response: The response.
            groups: What its log holds.
            schedule: Has the log taken, and settled, within `FLUSH_S`.
            drop: Ends the run when nothing can be logged any more.
        """
        self.number, self.id = response.number, response.id
        self.has_ended = self.is_broken = False
        self.num_events = sum(group.num_events for group in groups)
        self._first = self.num_events
        self._schedule = schedule
        self._drop = drop
        self._events: list[bytes] = []
        self._replay: list[Any] = []
        self._end: End | None = None
        self._written: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, events: bytes, num_events: int, replay: Any) -> None:
        """Log framed events, none or more, and what they were made of, as JSON has it."""
        self._events.append(events)
        self._replay.append(replay)
        self.num_events += num_events
        # A group has the number of its first event: one without any waits for the next.
        if self.num_events > self._first:
            self._schedule(self)

    async def end(self, events: bytes, num_events: int, end: End) -> None:
        """Log the last events, at least one, and return when all is in the store.

        Raises:
            LeaseLostError: Another ingress runs the response, or it was cancelled or deleted.
            JobsUnavailableError: The store can't be written.
        """
        self._end = end
        self.add(events, num_events, None)
        await self._written

    def take(self) -> Entry:
        """Return what waits, which is then on its way."""
        group = Group(
            self._first,
            self.num_events - self._first,
            b"".join(self._events).decode(),
            json.dumps(self._replay),
        )
        self._first, self._events, self._replay = self.num_events, [], []
        return Entry(self.number, group, self._end)

    def settle(self, entry: Entry, error: Exception | None) -> None:
        """Note that an entry is in the store, or why it is not."""
        self.is_broken = error is not None
        self.has_ended = error is None and entry.end is not None
        if self._written.done():  # what waited for it was cancelled
            return
        if self.has_ended:
            self._written.set_result(None)
        elif error is not None and self._end is not None:
            self._written.set_exception(error)
        elif error is not None:
            self._drop()


class _Flusher:
    """Writes the logs of all running responses together."""

    def __init__(self, jobs: Jobs, ingress: str) -> None:
        self._log = jobs.response_log
        self._news = jobs.response_news
        self._ingress = ingress
        self._waiting: dict[int, RunLog] = {}
        self._flushing: asyncio.Task[None] | None = None

    def schedule(self, log: RunLog) -> None:
        """Write a log with the others, soon."""
        self._waiting[log.number] = log
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())

    def forget(self, log: RunLog) -> None:
        """Don't write a log any more."""
        self._waiting.pop(log.number, None)

    async def aclose(self) -> None:
        """Wait until nothing is being written."""
        if self._flushing is not None:
            await self._flushing

    async def _flush(self) -> None:
        try:
            while self._waiting:
                await asyncio.sleep(FLUSH_S)
                logs, self._waiting = list(self._waiting.values()), {}
                entries = [(log, log.take()) for log in logs if not log.is_broken]
                error: Exception | None = None
                lost: set[int] = set()
                try:
                    lost = await self._log.append(self._ingress, [entry for _, entry in entries])
                except Exception as failed:  # else those that wait for it would wait for ever
                    if not isinstance(failed, JobsUnavailableError):
                        logger.exception("the log of responses has failed")
                    error = failed
                for log, entry in entries:
                    problem = LeaseLostError("it is lost") if log.number in lost else error
                    log.settle(entry, problem)
                    if problem is None:
                        self._news.logged(log.id)
        finally:
            self._flushing = None


class Answers(Protocol):
    """Makes the events of responses."""

    async def answer(self, response: StoredResponse, groups: list[Group], log: RunLog) -> None:
        """Generate a response, behind what is logged of it, to its end.

        Raises:
            RaystreamError: It was refused, or can't go on.
            LeaseLostError, JobsUnavailableError: See `RunLog.end`.
        """
        ...

    async def fail(self, response: StoredResponse, log: RunLog, message: str) -> None:
        """End a response that `answer` has raised for."""
        ...


@dataclass(slots=True)
class _Run:
    """A response that this ingress runs."""

    task: asyncio.Task[None]
    owner: str
    log: RunLog | None = None


class ResponseRunner:
    """Runs responses in the background while its ingress lives."""

    def __init__(
        self,
        jobs: Jobs,
        answers: Answers,
        run_work: RunWork,
        standing_of: StandingOf,
        *,
        poll_s: float = POLL_S,
    ) -> None:
        """Set what it runs with.

        Args:
            jobs: The responses.
            answers: Makes their events.
            run_work: See `RunWork`.
            standing_of: See `StandingOf`.
            poll_s: How often to look for responses.
        """
        self._jobs = jobs
        self._answers = answers
        self._run_work = run_work
        self._standing_of = standing_of
        self._poll_s = poll_s
        self._name = secrets.token_hex(8)
        self._flusher = _Flusher(jobs, self._name)
        self._runs: dict[int, _Run] = {}

    async def run(self) -> None:
        """Run responses until this is cancelled; then leave them to other ingresses at once."""
        news, responses = self._jobs.response_news.of_runner, self._jobs.responses
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(again_and_again("responses", self._turn, news.wait, self._poll_s))
                # Beside the turns, since it may take longer than a lease lasts.
                parts.create_task(
                    again_and_again("responses", responses.expire, asyncio.sleep, EXPIRE_S)
                )
        finally:
            tasks = [run.task for run in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._flusher.aclose()
            with suppress(JobsUnavailableError):
                await responses.leases.release(self._name)

    async def _turn(self) -> None:
        """Renew leases, drop what is cancelled or lost, and claim what is free."""
        responses = self._jobs.responses
        if self._runs:
            running = list(self._runs.items())
            rows = await responses.leases.renew(self._name, [number for number, _ in running])
            held = {row["number"] for row in rows}
            for number, run in running:
                if number not in held and not (run.log is not None and run.log.has_ended):
                    run.task.cancel()
        owners = [run.owner for run in self._runs.values()]
        room = self._jobs.config.max_running_responses - len(self._runs)
        for response in await responses.claim(self._name, self._runs.keys(), owners, room):
            self._start(response)

    def _start(self, response: StoredResponse) -> None:
        run = _Run(asyncio.create_task(self._guarded(response)), response.owner)
        self._runs[response.number] = run

        def ended(task: asyncio.Task[None]) -> None:
            del self._runs[response.number]
            if run.log is not None:
                self._flusher.forget(run.log)
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("response %s has failed here", response.id, exc_info=error)
            self._jobs.response_news.of_runner.announce()

        run.task.add_done_callback(ended)

    async def _guarded(self, response: StoredResponse) -> None:
        """Run a response; if that fails, its lease runs out, and then it is claimed again."""
        try:
            groups = await self._jobs.response_log.groups(response.number)
            run = self._runs[response.number]
            run.log = RunLog(response, groups, self._flusher.schedule, run.task.cancel)
            await self._run(response, groups, run.log)
        except LeaseLostError:
            logger.info("response %s is left to another ingress", response.id)
        except JobsUnavailableError:
            pass  # the store has logged it

    async def _run(self, response: StoredResponse, groups: list[Group], log: RunLog) -> None:
        standing = self._standing_of(response.owner)
        if standing is None:
            message = "The API key that created the response is no longer known."
            await self._answers.fail(response, log, message)
            return
        call = Call(
            PATH,
            b"",
            response.id.removeprefix("resp_"),
            replace(standing, tenant=response.tenant),
            response.owner or None,
        )
        wait_s = 0.5
        broken: list[Exception] = []

        async def work() -> None:
            try:
                await self._answers.answer(response, groups, log)
            except (LeaseLostError, JobsUnavailableError) as error:
                broken.append(error)

        while True:
            answer = await self._run_work(call, work)
            if broken:
                raise broken[0]
            if log.has_ended:
                return
            # One that loses its replicas must not go on doing so.
            if answer.lost_replicas or not answer.found_no_room:
                await self._answers.fail(response, log, _message(answer))
                return
            await asyncio.sleep(max(wait_s, min(answer.retry_after_s or 0, MAX_WAIT_S)))
            wait_s = min(2 * wait_s, MAX_WAIT_S)


def _message(answer: CallAnswer) -> str:
    """Return what an answer that is an error says."""
    return str(json.loads(answer.body)["error"]["message"])
