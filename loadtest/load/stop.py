"""Ends a run on signals: the first one drains it, the second one aborts it."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The request to end the run, and how to end it.

    Attributes:
        draining: No more requests are sent; those in flight may finish within the grace period.
        aborted: Requests in flight are cancelled at once.
        signal_number: The first signal; None if there was none.
    """

    def __init__(self, notify: Callable[[str], None] = lambda _: None) -> None:
        """Start with neither event set; `notify` is called with a message at each signal."""
        self.draining = asyncio.Event()
        self.aborted = asyncio.Event()
        self.signal_number: int | None = None
        self._notify = notify

    def request(self, signal_number: int) -> None:
        """Start draining, or abort if the run is already draining."""
        if self.draining.is_set():
            self.aborted.set()
            self._notify("Stopping now.")
        else:
            self.signal_number = signal_number
            self.draining.set()
            self._notify("Stopping: requests in flight may finish. A second signal ends them now.")

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle signals until the block ends; needs a running event loop."""
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self.request, number)
        try:
            yield
        finally:
            for number in SIGNALS:
                loop.remove_signal_handler(number)


async def wait_at_most(event: asyncio.Event, seconds: float | None) -> None:
    """Wait for an event, but at most this long; None sets no limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
