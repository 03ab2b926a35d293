"""Puts an engine to sleep when nobody uses it, and wakes it for the next request.

A light sleep keeps the process: its imports, tokenizer and compiled steps. `TextEngine.sleep` gives
back the memory of weights, keys and values. Requests that come meanwhile wait for one wake, each as
long as it likes: one that is cancelled leaves the others, and the wake goes on. It runs only on the
replica's event loop and needs no lock.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final, Protocol

from deployments.contract.errors import RaystreamError
from deployments.plan.replica_report import LightSleep, SleepState

logger = logging.getLogger("ray.serve.raystream.replica")

NOTICE_INTERVAL_S: Final = 2.0
"""Seconds between two notices to a client that waits for the model."""


class Sleeper(Protocol):
    """An engine that can sleep; see `TextEngine`."""

    async def sleep(self) -> bool:
        """Give memory back, and return whether it has."""
        ...

    async def wake(self) -> None:
        """Be ready for sequences again."""
        ...


class LightSleeper:
    """The sleep of one engine, and those who keep it awake."""

    def __init__(
        self,
        engine: Sleeper,
        after_s: float | None,
        read_bytes: Callable[[], int | None],
        on_change: Callable[[LightSleep], None],
        is_kept_awake: Callable[[], Awaitable[bool]],
        notice_interval_s: float = NOTICE_INTERVAL_S,
    ) -> None:
        """Start with an engine that is awake.

        Args:
            engine: The engine.
            after_s: Seconds without use after which it falls asleep; None for never.
            read_bytes: Returns the memory of this process.
            on_change: Called with each new report.
            is_kept_awake: Asked each time before it falls asleep; if so, it is asked again after
                another `after_s`.
            notice_interval_s: Seconds between two notices of `waking`.
        """
        self._engine = engine
        self._after_s = after_s
        self._read_bytes = read_bytes
        self._on_change = on_change
        self._is_kept_awake = is_kept_awake
        self._notice_interval_s = notice_interval_s
        self._num_users = 0
        self._timer: asyncio.TimerHandle | None = None
        self._change: asyncio.Task[None] | None = None
        self._is_closed = False
        self.report = LightSleep(SleepState.AWAKE, time.time())

    @property
    def state(self) -> SleepState:
        """Whether the engine sleeps."""
        return self.report.state

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the engine from falling asleep while the block runs."""
        self._num_users += 1
        self._stop_timer()
        try:
            yield
        finally:
            self._num_users -= 1
            self.watch()

    async def waking(self) -> AsyncIterator[float]:
        """Wake the engine, unless it is awake, and end once it is.

        Yields:
            How long that has taken so far, in seconds, from time to time.

        Raises:
            RaystreamError: It can't be woken, and why.
        """
        began_s = time.monotonic()
        while self.state is not SleepState.AWAKE:
            change = self._change or self._begin(self._wake())
            done, _ = await asyncio.wait([change], timeout=self._notice_interval_s)
            if done:
                change.result()
            else:
                yield time.monotonic() - began_s

    def watch(self) -> None:
        """Begin to wait for the time to sleep, unless the engine is in use, or that has begun."""
        if self._after_s is None or self._num_users or self._timer is not None or self._is_closed:
            return
        # The end of a change watches, too. A timer set before it would go off in an engine that
        # sleeps.
        if self.state is SleepState.AWAKE and self._change is None:
            self._timer = asyncio.get_running_loop().call_later(self._after_s, self._look)

    def close(self) -> None:
        """Fall asleep no more."""
        self._is_closed = True
        self._stop_timer()

    def _look(self) -> None:
        self._timer = None
        if not self._num_users and self._change is None:
            self._begin(self._sleep())

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, changing: "asyncio._CoroutineLike[None]") -> asyncio.Task[None]:
        change = self._change = asyncio.get_running_loop().create_task(changing)
        change.add_done_callback(self._end)
        return change

    def _end(self, change: asyncio.Task[None]) -> None:
        self._change = None
        if not change.cancelled() and (error := change.exception()) is not None:
            logger.error("%s", error)  # those who wait for it get it, too, if any still do
        self.watch()

    async def _sleep(self) -> None:
        """Fall asleep; try again later if the engine still runs something, or is kept awake."""
        # A request that comes after `_look`, or while this is asked, finds the engine awake.
        if await self._is_kept_awake() or self._num_users or self._is_closed:
            return
        awake_bytes = self._read_bytes()
        self._note(SleepState.FALLING_ASLEEP)
        slept = False
        try:
            slept = await self._engine.sleep()
        except RaystreamError:
            logger.exception("the engine can't sleep")  # it has ended; health checks find that
        if not slept:
            self._note(SleepState.AWAKE)
            return
        self.report = replace(
            self.report,
            num_sleeps=self.report.num_sleeps + 1,
            awake_bytes=awake_bytes,
            asleep_bytes=self._read_bytes(),
        )
        self._note(SleepState.ASLEEP)

    async def _wake(self) -> None:
        began_s = time.monotonic()
        self._note(SleepState.WAKING)
        try:
            await self._engine.wake()
        except BaseException:
            self._note(SleepState.ASLEEP)
            raise
        self.report = replace(self.report, last_wake_s=time.monotonic() - began_s)
        self._note(SleepState.AWAKE)

    def _note(self, state: SleepState) -> None:
        self.report = replace(self.report, state=state, state_unix_s=time.time())
        self._on_change(self.report)
