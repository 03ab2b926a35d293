"""Runs one batch: gives each of its lines a result, writes its files, and ends it.

Each line is a request like any other, without HTTP: the same body, the same checks, the same way to
a replica. It has the worst priority there is, so it runs on what others leave idle, and is parked
when they come. Where there is no room for it, it is asked again until there is.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from io import BufferedReader
from typing import Any, Final, Protocol

from deployments.contract.errors import JobsUnavailableError, RaystreamError
from serve_app.config import MAX_PRIORITY, LimitsConfig
from serve_app.http.errors import error_payload
from serve_app.http.standing import Standing
from serve_app.jobs.batch import Batch, BatchFaultError, Fault, Result, Status
from serve_app.jobs.batch_input import BatchInput, Line
from serve_app.jobs.calls import AskRoute, Call, CallAnswer, StandingOf, answered, faulty
from serve_app.jobs.files import FileWriter, StoredFile
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.leases import LeaseLostError

ERRORS_AT_ONCE: Final = 256
"""Lines of a late batch that get their errors in one transaction."""

FIRST_WAIT_S: Final = 0.5
"""Seconds until a line that found no room is asked again, if the answer names none; they double."""

MAX_WAIT_S: Final = 30.0
"""Most seconds until a line that found no room is asked again."""

MAX_LOSSES: Final = 5
"""How often replicas may be lost with a line before its last error is final. One that kills them is
found out by its first tries, unless they take too long to start again."""

FILE_MISSING: Final = Fault(
    "file_missing", "The contents of the file are missing, or have changed.", "input_file_id"
)

logger = logging.getLogger("ray.serve")


class Meter(Protocol):
    """Counts what the runner does."""

    def count_line(self, *, is_error: bool) -> None:
        """Count a line that got its result."""
        ...

    def running_batches(self, number: int) -> None:
        """Note how many batches run here."""
        ...


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
            kept = await self._jobs.results.record(self._ingress, self._batch, results)
        for each in kept:
            self._meter.count_line(is_error=each.is_error)


class BatchRun:
    """How an ingress runs a batch, from the state in which it is to its end."""

    def __init__(
        self,
        jobs: Jobs,
        ingress: str,
        limits: LimitsConfig,
        ask: AskRoute,
        standing_of: StandingOf,
        meter: Meter,
    ) -> None:
        """Set what it runs with; see `BatchRunner`.

        Args:
            jobs: The batches.
            ingress: Who holds their leases.
            limits: Bounds each line as a request's body.
            ask: Asks a route.
            standing_of: See `StandingOf`.
            meter: Counts lines.
        """
        self._jobs = jobs
        self._name = ingress
        self._limits = limits
        self._ask = ask
        self._standing_of = standing_of
        self._meter = meter
        self._slots = asyncio.Semaphore(jobs.config.max_running_lines)

    async def run(self, batch: Batch, stopped: asyncio.Event, yielding: asyncio.Event) -> None:
        """Run a batch; if that fails, its lease runs out, and then it is claimed again.

        Args:
            batch: Its lease is the ingress's.
            stopped: Set when its lines shall run no more; it is ended then.
            yielding: Set when no further lines shall begin; its lease is given back once those
                that run have their results.
        """
        try:
            try:
                await self._run(batch, stopped, yielding)
            except* BatchFaultError as failed:
                fault = next(
                    each.fault for each in failed.exceptions if isinstance(each, BatchFaultError)
                )
                await self._end(batch, Status.FAILED, fault)
        except* LeaseLostError as lost:
            logger.info("batch %s is left: %s", batch.id, lost.exceptions[0])
        except* JobsUnavailableError:
            pass  # the store has logged it

    async def _run(self, batch: Batch, stopped: asyncio.Event, yielding: asyncio.Event) -> None:
        batches = self._jobs.batches
        standing = self._standing_of(batch.owner)
        if batch.status in (Status.VALIDATING, Status.IN_PROGRESS) and standing is None:
            fault = Fault("unknown_key", "The API key that created the batch is no longer known.")
            await self._end(batch, Status.FAILED, fault)
            return
        if batch.status is Status.VALIDATING:
            with self._reading(batch):
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
            await self._until(stopped, self._run_lines(batch, standing, yielding))
            batch = await batches.finalize(self._name, batch)
            if batch.status is Status.IN_PROGRESS and not stopped.is_set():
                if not yielding.is_set():
                    raise BatchFaultError(FILE_MISSING)
                await batches.leases.give_back(self._name, batch.number)
                return
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
            BatchFaultError: Its contents are gone.
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
            raise BatchFaultError(FILE_MISSING)
        return BatchInput(self._jobs.store, file, batch.endpoint, self._limits)

    async def _lines(self, batch: Batch) -> AsyncGenerator[Line, None]:
        """Yield the lines of a batch's file; see `_input` and `_reading` for errors."""
        with self._reading(batch):
            async for line in (await self._input(batch)).lines():
                yield line

    @contextmanager
    def _reading(self, batch: Batch) -> Iterator[None]:
        """Give a batch that is late an end even if its file can't be read; others wait for it.

        Raises:
            BatchFaultError: The batch is late.
            JobsUnavailableError: It is not, and may be claimed again.
        """
        try:
            yield
        except JobsUnavailableError as error:
            if self._jobs.store.unix_s() < batch.due_s:
                raise
            message = f"The file could not be read before the batch expired. {error.message}"
            raise BatchFaultError(Fault("file_unreadable", message, "input_file_id")) from error

    def _fault(self, num_lines: int) -> Fault | None:
        most = self._jobs.config.max_num_lines
        if num_lines == 0:
            return Fault("empty_file", "The file holds no request.", "input_file_id")
        if num_lines > most:
            message = f"The file holds more than {most} requests (jobs.max_num_lines)."
            return Fault("too_many_lines", message, "input_file_id")
        return None

    async def _run_lines(self, batch: Batch, standing: Standing, yielding: asyncio.Event) -> None:
        """Give each line that has none a result, but begin no more once the batch yields."""
        results = _Results(self._jobs, self._name, batch, self._meter)
        done = await self._jobs.results.done(batch)
        standing = _lowest(standing, batch.tenant)
        # Lines that wait to be asked again leave the slots to others, but are bounded, too.
        places = asyncio.Semaphore(self._jobs.config.max_running_lines)

        async def answer(line: Line) -> None:
            try:
                result = await self._result(batch, line, standing, yielding)
                if result is not None:
                    await results.add(result)
            finally:
                places.release()

        async with aclosing(self._lines(batch)) as lines, asyncio.TaskGroup() as tasks:
            async for line in lines:
                if line.number not in done:
                    await places.acquire()
                    if yielding.is_set():
                        break
                    tasks.create_task(answer(line))

    async def _result(
        self, batch: Batch, line: Line, standing: Standing, yielding: asyncio.Event
    ) -> Result | None:
        """Ask a line until it has an answer, or an error that is final; None if it has to yield."""
        if line.fault is not None:
            return faulty(batch, line, line.fault)
        request_id = f"{batch.id}_{line.number}"
        key_name = batch.owner or None
        call = Call(batch.endpoint, line.body, request_id, standing, key_name)
        wait_s = FIRST_WAIT_S
        while True:
            async with self._slots:
                if yielding.is_set():
                    return None
                answer = await self._asked(call)
            is_final = not answer.found_no_room
            if answer.lost_replicas and not is_final:
                num_losses = await self._jobs.results.note_loss(self._name, batch, line.number)
                is_final = num_losses >= MAX_LOSSES
            if is_final:
                return answered(batch, line, request_id, answer)
            with suppress(TimeoutError):
                async with asyncio.timeout(max(wait_s, min(answer.retry_after_s or 0, MAX_WAIT_S))):
                    await yielding.wait()
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
        done = await self._jobs.results.done(batch)
        late = RaystreamError("The request did not run before the batch expired.")
        late.code = "batch_expired"
        results: list[Result] = []
        async for line in self._lines(batch):
            if line.number not in done:
                results.append(faulty(batch, line, line.fault or late))
            if len(results) >= ERRORS_AT_ONCE:
                await self._jobs.results.record(self._name, batch, results)
                results = []
        await self._jobs.results.record(self._name, batch, results)

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
        async for some in self._jobs.results.lines(batch, errors=errors):
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
