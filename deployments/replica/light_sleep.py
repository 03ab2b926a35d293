"""Puts an engine to sleep when nobody uses it, and wakes it for the next request.

A light sleep keeps the process: its imports, tokenizer and compiled steps. The engine gives back
the memory of weights, keys and values (`TextEngine.sleep`, `PoolingWorker.sleep`). Requests that
come meanwhile wait for one wake, each as long as it likes: one that is cancelled leaves the others,
and the wake goes on. It runs only on the replica's event loop and needs no lock.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Final, Protocol

from deployments.contract.errors import RaystreamError
from deployments.plan.replica_report import LightSleep, SleepState

logger = logging.getLogger("ray.serve.raystream.replica")

NOTICE_INTERVAL_S: Final = 2.0
"""Seconds between two notices to a client that waits for the model."""


class Sleeper(Protocol):
    """An engine that can sleep; see `TextEngine` and `PoolingWorker`."""

    async def sleep(self) -> bool:
        """Give memory back, and return whether it has."""
        ...

    async def wake(self) -> None:
        """Be ready for sequences again."""
        ...


TICK_S: Final = 0.05
"""Between two looks at what keeps an engine awake whose turn is over. Ends of uses are told; one
that was not accepted yet when the others were parked is parked at the next look."""

MAX_ABORT_S: Final = 10.0
"""How long a use may take to end after its sequence was aborted. A use that does not end would keep
the device from the other models for ever."""

MAX_TRIES: Final = 20
"""How often an engine that nobody uses any more may say that it still runs something: the ends of
its sequences, or a probe, reach it a moment later. Then it can't sleep at all."""


class Turn(Protocol):
    """When an engine may hold memory; see `deployments.replica.own_turn`."""

    async def taken(self) -> None:
        """Wait until it may."""
        ...

    async def over(self) -> None:
        """Wait until it has to give its memory back."""
        ...

    def free(self) -> None:
        """Say that it has."""
        ...


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How those who use an engine leave it when its turn is over.

    Attributes:
        park: Gives all sequences that may be parked back to their ingresses.
        abort: Ends all sequences; they go on elsewhere.
        patience_s: How long those that can't be parked may go on, in seconds.
        end_process: Ends this process, whose engine can't give its memory back.
    """

    park: Callable[[], None]
    abort: Callable[[], None]
    patience_s: float
    end_process: Callable[[], None]


@dataclass(eq=False, slots=True)
class Use:
    """One who keeps an engine awake; see `LightSleeper.in_use`.

    Attributes:
        is_inside: Whether it has found the engine awake; until then it only waits.
    """

    is_inside: bool = False


class LightSleeper:
    """The sleep of one engine, and those who keep it awake."""

    def __init__(
        self,
        engine: Sleeper,
        after_s: Callable[[], float | None],
        read_bytes: Callable[[], int | None],
        on_change: Callable[[LightSleep], None],
        is_kept_awake: Callable[[], Awaitable[bool]],
        notice_interval_s: float = NOTICE_INTERVAL_S,
        turn: Turn | None = None,
        turn_end: TurnEnd | None = None,
        ends_instead: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start with an engine that is awake.

        Args:
            engine: The engine.
            after_s: Returns the seconds without use after which it falls asleep; None for never.
            read_bytes: Returns the memory of its device that this process keeps from others.
            on_change: Called with each new report.
            is_kept_awake: Asked each time before it falls asleep; if so, it is asked again after
                another `after_s`.
            notice_interval_s: Seconds between two notices of `waking`.
            turn: When the engine may hold memory, which it may now; None for always.
            turn_end: How it is left when its turn is over; given with `turn`.
            ends_instead: Asked before it falls asleep without use: whether its process is to end
                instead, so that it stays awake until then.
        """
        assert (turn is None) == (turn_end is None), "turns end"
        self._engine = engine
        self._after_s = after_s
        self._read_bytes = read_bytes
        self._on_change = on_change
        self._is_kept_awake = is_kept_awake
        self._ends_instead = ends_instead
        self._notice_interval_s = notice_interval_s
        self._turn = turn
        self._turn_end = turn_end
        self._users: set[Use] = set()
        self._use_ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._change: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None  # while it is awake in its turn
        self._is_turn_over = False
        self._is_closed = False
        self.report = LightSleep(SleepState.AWAKE, time.time())
        self.ends_instead = False
        """Whether its process is to end, since it may not fall asleep."""
        self.num_failures = 0
        """How often in a row it could not fall asleep."""

    @property
    def state(self) -> SleepState:
        """Whether the engine sleeps."""
        return self.report.state

    @property
    def is_ready(self) -> bool:
        """Whether a request that comes now finds the engine awake."""
        return self.state is SleepState.AWAKE and not self._is_turn_over

    @property
    def is_in_use(self) -> bool:
        """Whether anybody uses the engine, or waits for it to wake."""
        return bool(self._users)

    @contextmanager
    def in_use(self) -> Iterator[Use]:
        """Keep the engine from falling asleep while the block runs, but for the end of its turn."""
        use = Use()
        self._users.add(use)
        self._stop_timer()
        self.ends_instead = False
        try:
            yield use
        finally:
            self._users.remove(use)
            self._use_ended.set()
            self.watch()

    async def waking(self, use: Use) -> AsyncIterator[float]:
        """Wake the engine, unless it is awake, and end once it is.

        Args:
            use: The caller's, which is inside from the end on.

        Yields:
            How long that has taken so far, in seconds: 0 at once, then from time to time.

        Raises:
            RaystreamError: It can't be woken, and why.
        """
        began_s = time.monotonic()
        if not self.is_ready:
            yield 0.0
        while not self.is_ready:
            change = self._change or self._begin(self._wake())
            done, _ = await asyncio.wait([change], timeout=self._notice_interval_s)
            if done:
                change.result()
            else:
                yield time.monotonic() - began_s
        use.is_inside = True

    async def awake(self, use: Use) -> None:
        """Wake the engine, unless it is awake, and return once it is; see `waking`.

        Raises:
            RaystreamError: It can't be woken, and why.
        """
        async for _ in self.waking(use):
            pass

    def watch(self) -> None:
        """Begin to wait for the time to sleep, unless the engine is in use, or that has begun."""
        self._follow()
        if self._users or self._timer is not None or self._is_closed:
            return
        after_s = self._after_s()
        # The end of a change watches, too. A timer set before it would go off in an engine that
        # sleeps.
        if after_s is not None and self.state is SleepState.AWAKE and self._change is None:
            self._timer = asyncio.get_running_loop().call_later(after_s, self._look)

    def wake_if_kept(self) -> None:
        """Wake in the model's turn if it is to be kept awake, although nobody waits for that.

        Without turns nothing sleeps that is kept awake, but the end of a turn does not ask.
        """
        is_asleep = self.state is SleepState.ASLEEP and self._change is None
        if self._turn is not None and is_asleep and not self._is_closed:
            self._begin(self._wake_if_kept())

    def close(self) -> None:
        """Fall asleep no more, and wait for no turn."""
        self._is_closed = True
        self._stop_timer()
        if self._following is not None:
            self._following.cancel()
        if self._change is not None and self._turn is not None:
            self._change.cancel()

    def _look(self) -> None:
        self._timer = None
        if not self._users and self._change is None:
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
        if await self._is_kept_awake() or self._users or self._is_closed:
            return
        self.ends_instead = self._ends_instead()
        if not self.ends_instead:
            slept = await self._give_back()
            self.num_failures = 0 if slept else self.num_failures + 1

    async def _give_back(self) -> bool:
        """Let the engine give its memory back; return whether it has."""
        awake_bytes = self._read_bytes()
        self._note(SleepState.FALLING_ASLEEP)
        slept = False
        try:
            slept = await self._engine.sleep()
        except RaystreamError:
            logger.exception("the engine can't sleep")  # it has ended; health checks find that
        if not slept:
            self._note(SleepState.AWAKE)
            return False
        self.report = replace(
            self.report,
            num_sleeps=self.report.num_sleeps + 1,
            awake_bytes=awake_bytes,
            asleep_bytes=self._read_bytes(),
        )
        self._note(SleepState.ASLEEP)
        if self._turn is not None:
            self._turn.free()
        return True

    async def _wake(self) -> None:
        if self._turn is not None:
            await self._turn.taken()
        began_s = time.monotonic()
        self._note(SleepState.WAKING)
        try:
            await self._engine.wake()
        except BaseException:
            self._note(SleepState.ASLEEP)
            raise
        self.report = replace(self.report, last_wake_s=time.monotonic() - began_s)
        self._note(SleepState.AWAKE)

    async def _wake_if_kept(self) -> None:
        if await self._is_kept_awake():
            await self._wake()

    def _follow(self) -> None:
        """Begin to wait for the end of the turn, unless that has begun or there are no turns."""
        is_due = self._turn is not None and self._following is None and not self._is_closed
        if is_due and self.state is SleepState.AWAKE:
            self._following = asyncio.get_running_loop().create_task(self._until_over())
            self._following.add_done_callback(self._end_following)

    def _end_following(self, following: asyncio.Task[None]) -> None:
        self._following = None
        if not following.cancelled() and (error := following.exception()) is not None:
            logger.error("the end of the turn", exc_info=error)
        self._follow()

    async def _until_over(self) -> None:
        """Wait until the turn is over, and end it."""
        assert self._turn is not None, "it is followed"
        await self._turn.over()
        while self._change is not None:
            await asyncio.wait([self._change])
            await self._turn.over()  # it may have waited for the next one, to wake
        if self.state is SleepState.AWAKE:
            self._stop_timer()
            self._is_turn_over = True  # new requests wait from here on
            await asyncio.wait([self._begin(self._end_turn())])

    async def _end_turn(self) -> None:
        """Let all leave the engine, and give its memory back."""
        assert self._turn_end is not None, "turns end"
        try:
            await self._clear(self._turn_end)
            for _ in range(MAX_TRIES):
                if await self._give_back():
                    return
                await asyncio.sleep(TICK_S)
            logger.error("the model's turn is over, and it can't sleep: its process ends")
            self._turn_end.end_process()
        finally:
            self._is_turn_over = False

    async def _clear(self, end: TurnEnd) -> None:
        """Return once nobody is inside."""
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + end.patience_s
        while any(use.is_inside for use in self._users):
            self._use_ended.clear()
            end.park()
            if now_s() >= until_s:
                end.abort()
            if now_s() >= until_s + MAX_ABORT_S:
                logger.error("the model's turn is over, and it is still used: its process ends")
                end.end_process()
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._use_ended.wait()

    def _note(self, state: SleepState) -> None:
        self.report = replace(self.report, state=state, state_unix_s=time.time())
        self._on_change(self.report)
