"""How a run is ended from outside: a first signal drains it, a second one aborts it."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """What was asked for so far.

    Attributes:
        draining: Nothing more is sent; what is under way may end within the grace period.
        aborted: What is under way is ended now.
        signal_number: The first signal; None if there was none.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        """Go on; `tell` is given a sentence with each signal."""
        self.draining = asyncio.Event()
        self.aborted = asyncio.Event()
        self.signal_number: int | None = None
        self._tell = tell

    def request(self, signal_number: int) -> None:
        """Drain; or abort, if it drains already."""
        if self.draining.is_set():
            self.aborted.set()
            self._tell("Stopping now.")
        else:
            self.signal_number = signal_number
            self.draining.set()
            self._tell("Stopping: what is under way may end. The next signal ends it now.")

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Hear signals until the block ends; needs a running event loop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.request, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, or until the time is over."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
