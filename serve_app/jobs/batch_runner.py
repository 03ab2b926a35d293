"""Runs batches: claims those that no ingress runs, and asks the routes what their lines ask.

Each line is a request like any other, without HTTP: the same body, the same checks, the same way to
a replica. It has the worst priority there is, so it runs on what others leave idle, and is parked
when they come. Where there is no room for it, it is asked again until there is.

A batch whose lease is lost, or whose store fails, is dropped at once and claimed again later, by
whichever ingress comes first; what has a result by then does not run again.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from io import BufferedReader
from typing import Any, Final, Protocol

from deployments.contract.errors import (
    FirstTokenTimeoutError,
    JobsUnavailableError,
    RaystreamError,
)
from serve_app.config import MAX_PRIORITY, LimitsConfig
from serve_app.http.errors import error_payload
from serve_app.http.standing import Standing
from serve_app.jobs.batch_input import BatchInput, Line
from serve_app.jobs.batches import Batch, Fault, LeaseLostError, Result, Status
from serve_app.jobs.files import FileWriter, StoredFile
from serve_app.jobs.jobs import Jobs

POLL_S: Final = 1.0
"""How often leases are renewed, and batches of other ingresses looked for."""

EXPIRE_S: Final = 60.0
"""How often what is too old is erased."""

MAX_RUNNING: Final = 8
"""Batches that an ingress runs at once; further ones wait for their turn."""

MAX_ENDING: Final = 8
"""Batches that it ends beside them: their lines need not run any more, so they don't wait."""

ERRORS_AT_ONCE: Final = 256
"""Lines of a late batch that get their errors in one transaction."""

MAX_WAIT_S: Final = 30.0
"""Most seconds until a line that found no room is asked again."""

NO_ROOM: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class Call:
    """A request to one of the server's own routes.

    Attributes:
        path: The route's.
        body: JSON.
        request_id: Names it.
        standing: Whose it is, and how soon it may run.
        key_name: The API key that it is for; None without keys.
    """

    path: str
    body: bytes
    request_id: str
    standing: Standing
    key_name: str | None


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """What a route answered.

    Attributes:
        status: The HTTP status.
        body: JSON.
        code: The code of the error; None if it is none.
        retry_after_s: When it said to come back; None if it did not.
    """

    status: int
    body: bytes
    code: str | None = None
    retry_after_s: float | None = None

    @property
    def found_no_room(self) -> bool:
        """Whether the same request may succeed later, without anything having failed."""
        return self.status in NO_ROOM or self.code == FirstTokenTimeoutError.code


AskRoute = Callable[[Call], Awaitable[CallAnswer]]
StandingOf = Callable[[str], Standing | None]
"""Returns the standing of the owner of a batch; None if there is no such API key any more."""


class Meter(Protocol):
    """Counts what the runner does."""

    def count_line(self, *, is_error: bool) -> None:
        """Count a line that got its result."""
        ...

    def running_batches(self, number: int) -> None:
        """Note how many batches run here."""
        ...


class InputLostError(Exception):
    """The contents of a batch's file are gone, or are not what was counted."""


@dataclass(slots=True)
class _Run:
    """A batch that this ingress runs."""

    task: asyncio.Task[None]
    owner: str
    stopped: asyncio.Event = field(default_factory=asyncio.Event)


class _Results:
    """The results of a batch on their way to the store: those that wait go in one transaction."""

    def __init__(self, jobs: Jobs, ingress: str, batch: Batch, meter: Meter) -> None:
        self._jobs, self._ingress, self._batch, self._meter = jobs, ingress, batch, meter
        self._waiting: list[Result] = []
        self._writing = asyncio.Lock()

    async def add(self, result: Result) -> None:
        """Return when the result is in the store."""
        self._waiting.append(result)
        async with self._writing:
            results, self._waiting = self._waiting, []
            if not results:  # the call before has written it
                return
            kept = await self._jobs.batches.record(self._ingress, self._batch, results)
        for each in kept:
            self._meter.count_line(is_error=each.is_error)


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
        self._limits = limits
        self._ask = ask
        self._standing_of = standing_of
        self._meter = meter
        self._poll_s = poll_s
        self._name = secrets.token_hex(8)
        self._runs: dict[str, _Run] = {}
        self._slots = asyncio.Semaphore(jobs.config.max_running_lines)
        self._expired_s = -EXPIRE_S

    async def run(self) -> None:
        """Run batches until this is cancelled; then leave them to other ingresses at once."""
        try:
            while True:
                try:
                    await self._turn()
                except JobsUnavailableError:
                    pass  # the store has logged it
                except Exception:  # the next turn may succeed, and nobody else runs batches here
                    logger.exception("the runner of batches has failed, and goes on")
                await self._jobs.wait(self._poll_s)
        finally:
            tasks = [run.task for run in self._runs.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(JobsUnavailableError):
                await self._jobs.batches.release(self._name)

    async def _turn(self) -> None:
        """Renew leases, stop what is cancelled or due, claim what is free, erase what is old."""
        now_s = self._jobs.store.unix_s()
        if self._runs:
            held = await self._jobs.batches.renew(self._name, list(self._runs))
            for id_, run in list(self._runs.items()):
                batch = held.get(id_)
                if batch is None:
                    run.task.cancel()
                elif batch.status is Status.CANCELLING or batch.due_s <= now_s:
                    run.stopped.set()
        while len(self._runs) < MAX_RUNNING + MAX_ENDING:
            beside = {id_: run.owner for id_, run in self._runs.items()}
            claimed = await self._jobs.batches.claim(
                self._name, beside, only_ending=len(self._runs) >= MAX_RUNNING
            )
            if claimed is None:
                break
            self._start(claimed)
        if time.monotonic() - self._expired_s >= EXPIRE_S:
            self._expired_s = time.monotonic()
            await self._jobs.batches.expire()
            await self._jobs.files.expire()

    def _start(self, batch: Batch) -> None:
        stopped = asyncio.Event()
        run = _Run(asyncio.create_task(self._guarded(batch, stopped)), batch.owner, stopped)
        self._runs[batch.id] = run
        self._meter.running_batches(len(self._runs))

        def ended(task: asyncio.Task[None]) -> None:
            del self._runs[batch.id]
            self._meter.running_batches(len(self._runs))
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("batch %s has failed here", batch.id, exc_info=error)
            self._jobs.announce()

        run.task.add_done_callback(ended)

    async def _guarded(self, batch: Batch, stopped: asyncio.Event) -> None:
        """Run a batch; if that fails, its lease runs out, and then it is claimed again."""
        try:
            try:
                await self._run(batch, stopped)
            except InputLostError:
                fault = Fault(
                    "file_missing",
                    "The contents of the file are missing, or have changed.",
                    "input_file_id",
                )
                await self._end(batch, Status.FAILED, fault)
        except* LeaseLostError as lost:
            logger.info("batch %s is left: %s", batch.id, lost.exceptions[0])
        except* JobsUnavailableError:
            pass  # the store has logged it

    async def _run(self, batch: Batch, stopped: asyncio.Event) -> None:
        batches = self._jobs.batches
        standing = self._standing_of(batch.owner)
        if batch.status in (Status.VALIDATING, Status.IN_PROGRESS) and standing is None:
            fault = Fault("unknown_key", "The API key that created the batch is no longer known.")
            await self._end(batch, Status.FAILED, fault)
            return
        if batch.status is Status.VALIDATING:
            num_lines = await (await self._input(batch)).count()
            if (wrong := self._fault(num_lines)) is not None:
                await self._end(batch, Status.FAILED, wrong)
                return
            batch = await batches.begin(self._name, batch, num_lines)
        batch = await batches.finalize(self._name, batch)
        while batch.status is Status.IN_PROGRESS:
            assert standing is not None, "without one it has failed"
            if batch.due_s <= self._jobs.store.unix_s():
                await self._expire_lines(batch)
                await self._end(batch, Status.EXPIRED)
                return
            # It was stopped as late, but the clock was set back.
            stopped.clear()
            await self._until(stopped, self._run_lines(batch, standing))
            batch = await batches.finalize(self._name, batch)
            if batch.status is Status.IN_PROGRESS and not stopped.is_set():
                raise InputLostError("it has other lines than were counted")
        ended = Status.CANCELLED if batch.status is Status.CANCELLING else Status.COMPLETED
        await self._end(batch, ended)

    async def _until(self, stopped: asyncio.Event, work: Awaitable[None]) -> None:
        """Wait for the work; cancel it when the batch is stopped."""
        working: asyncio.Future[Any] = asyncio.ensure_future(work)
        stopping: asyncio.Future[Any] = asyncio.create_task(stopped.wait())
        try:
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.wait((working, stopping))
        if not working.cancelled():
            working.result()

    async def _input(self, batch: Batch) -> BatchInput:
        """Open a batch's file.

        Raises:
            InputLostError: Its contents are gone.
            JobsUnavailableError: It can't be opened.
        """
        path = self._jobs.files.path(batch.input_file_id)

        def opened() -> BufferedReader | None:
            try:
                return path.open("rb")
            except FileNotFoundError:
                if not path.parent.is_dir():  # the volume is gone, and may come back
                    raise
                return None

        file = await self._jobs.store.on_disk(opened)
        if file is None:
            raise InputLostError("its contents are gone")
        return BatchInput(self._jobs.store, file, batch.endpoint, self._limits)

    def _fault(self, num_lines: int) -> Fault | None:
        most = self._jobs.config.max_num_lines
        if num_lines == 0:
            return Fault("empty_file", "The file holds no request.", "input_file_id")
        if num_lines > most:
            message = f"The file holds more than {most} requests (jobs.max_num_lines)."
            return Fault("too_many_lines", message, "input_file_id")
        return None

    async def _run_lines(self, batch: Batch, standing: Standing) -> None:
        """Give each line that has none a result; return when all have one."""
        results = _Results(self._jobs, self._name, batch, self._meter)
        done = await self._jobs.batches.lines_done(batch)
        standing = _lowest(standing, batch.tenant)
        # Lines that wait to be asked again leave the slots to others, but are bounded, too.
        places = asyncio.Semaphore(self._jobs.config.max_running_lines)

        async def answer(line: Line) -> None:
            try:
                await results.add(await self._result(batch, line, standing))
            finally:
                places.release()

        source = await self._input(batch)
        async with asyncio.TaskGroup() as tasks:
            async for line in source.lines():
                if line.number not in done:
                    await places.acquire()
                    tasks.create_task(answer(line))

    async def _result(self, batch: Batch, line: Line, standing: Standing) -> Result:
        """Ask a line until it has an answer, or an error that is final."""
        if line.fault is not None:
            return _faulty(batch, line, line.fault)
        request_id = f"{batch.id}_{line.number}"
        key_name = batch.owner or None
        call = Call(batch.endpoint, line.body, request_id, standing, key_name)
        wait_s = 0.5
        while True:
            async with self._slots:
                answer = await self._asked(call)
            if not answer.found_no_room:
                return _answered(batch, line, request_id, answer)
            await asyncio.sleep(max(wait_s, min(answer.retry_after_s or 0, MAX_WAIT_S)))
            wait_s = min(2 * wait_s, MAX_WAIT_S)

    async def _asked(self, call: Call) -> CallAnswer:
        """Return a route's answer; a 500 if it has none, so that other lines are not lost."""
        try:
            return await self._ask(call)
        except Exception:
            logger.exception("a line of a batch has failed: %s", call.request_id)
            failed = RaystreamError("The server has failed at this request.")
            return CallAnswer(failed.status, json.dumps(error_payload(failed)).encode())

    async def _expire_lines(self, batch: Batch) -> None:
        """Give the lines without a result the error that they came too late."""
        done = await self._jobs.batches.lines_done(batch)
        late = RaystreamError("The request did not run before the batch expired.")
        late.code = "batch_expired"
        results: list[Result] = []
        source = await self._input(batch)
        async for line in source.lines():
            if line.number not in done:
                results.append(_faulty(batch, line, line.fault or late))
            if len(results) >= ERRORS_AT_ONCE:
                await self._jobs.batches.record(self._name, batch, results)
                results = []
        await self._jobs.batches.record(self._name, batch, results)

    async def _end(self, batch: Batch, status: Status, fault: Fault | None = None) -> None:
        """Write a batch's files, and end it, which makes them known."""
        outputs, errors = self._jobs.files.writer(), self._jobs.files.writer()
        try:
            output = await self._write(batch, outputs, "output", errors=False)
            error = await self._write(batch, errors, "error", errors=True)
            await self._jobs.batches.end(self._name, batch, status, output, error, fault)
        finally:
            # Keeps them if they are known. Another ingress may have ended the batch meanwhile.
            await outputs.discard()
            await errors.discard()
        self._jobs.announce()

    async def _write(
        self, batch: Batch, writer: FileWriter, kind: str, *, errors: bool
    ) -> StoredFile | None:
        """Write a file of results, and return what its row will be; None if there are none."""
        async for some in self._jobs.batches.results(batch, errors=errors):
            await writer.write(some)
        if not writer.num_bytes:
            return None
        await writer.finish()
        now_s = self._jobs.store.unix_s()
        name = f"{batch.id}_{kind}.jsonl"
        expires_s = now_s + self._jobs.config.expires_after_s
        return StoredFile(
            writer.id, batch.owner, name, "batch_output", writer.num_bytes, now_s, expires_s
        )


def _lowest(standing: Standing, tenant: str) -> Standing:
    """Return the standing of a batch's lines: the tenant's share, and the worst priority."""
    return replace(
        standing,
        tenant=tenant,
        priority=MAX_PRIORITY,
        best_priority=MAX_PRIORITY,
        bound_by="A batch",
    )


def _answered(batch: Batch, line: Line, request_id: str, answer: CallAnswer) -> Result:
    """Return the result of a line that a route has answered, in OpenAI's shape."""
    custom_id = json.dumps(line.custom_id)
    text = (
        f'{{"id": "batch_req_{batch.key}_{line.number}", "custom_id": {custom_id}, '
        f'"response": {{"status_code": {answer.status}, "request_id": "{request_id}", '
        # It is JSON already, and may be long.
        f'"body": {_in_a_line(answer.body.decode())}}}, "error": null}}'
    )
    return Result(line.number, answer.status != HTTPStatus.OK, text)


def _in_a_line(text: str) -> str:
    """Return JSON without what any reader takes for the end of a line."""
    for mark in ("\u2028", "\u2029", "\x85"):  # only strings can hold them
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.replace("\n", " ")


def _faulty(batch: Batch, line: Line, error: RaystreamError) -> Result:
    """Return the result of a line that no route was asked, in OpenAI's shape."""
    found = {
        "id": f"batch_req_{batch.key}_{line.number}",
        "custom_id": line.custom_id,
        "response": None,
        "error": {
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "line": line.number,
        },
    }
    return Result(line.number, True, json.dumps(found))
