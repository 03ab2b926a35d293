"""Shows progress during a run: a table on a terminal, otherwise a line every five seconds.

Events arrive between two reads of a socket, so they are only counted. A task of its own draws the
figures, at most four times a second.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table

from loadtest.results.record import ErrorKind, RequestRecord

RECENT_S = 10.0
TABLE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 5.0
MAX_TTFTS = 10_000
MIN_TABLE_WIDTH = 100
"""The columns that a terminal needs to show all figures side by side."""


class LiveFigures:
    """An `Observer` that counts events and returns them as a row of figures.

    Most servers count an answer's tokens only at its end, while an event may hold several. Until
    then, each of its events counts as the mean of those of the answers that have ended. Before the
    first of them has ended, each counts as one token, and the rate is shown as a lower bound.
    """

    def __init__(self) -> None:
        self.title = ""
        self.num_in_flight = 0
        self._tokens_per_event: float | None = None  # of the last level with an answer
        self.level_started("", 0.0, num_requests=None, duration_s=None)

    def level_started(
        self, title: str, now_s: float, *, num_requests: int | None, duration_s: float | None
    ) -> None:
        """Reset the figures, except for the requests in flight."""
        self.title = title
        self._started_s = now_s
        self._num_requests = num_requests
        self._duration_s = duration_s
        self.num_ended = 0
        self.errors: Counter[str] = Counter()
        self._events: deque[tuple[float, int | None]] = deque()
        self._num_recent_tokens = 0
        self._num_recent_uncounted = 0
        self._num_ended_events = 0
        self._num_ended_tokens = 0
        self._successes: deque[float] = deque()
        self._ttfts_ms: deque[float] = deque(maxlen=MAX_TTFTS)

    def started(self, now_s: float) -> None:
        """Count a request that is being sent."""
        self.num_in_flight += 1

    def content(self, now_s: float, num_tokens: int | None, ttft_ms: float | None) -> None:
        """Count a content event."""
        self._events.append((now_s, num_tokens))
        self._count(num_tokens, 1)
        if ttft_ms is not None:
            self._ttfts_ms.append(ttft_ms)
        self._forget(now_s)

    def ended(self, record: RequestRecord) -> None:
        """Count a request that ended; warm-up only changes the number in flight."""
        self.num_in_flight -= 1
        self._learn(record)
        if record.is_warmup:
            return
        self.num_ended += 1
        if record.error is None:
            self._successes.append(record.ended_s)
        elif record.error is not ErrorKind.CANCELLED:
            self.errors[record.error.value] += 1

    def row(self, now_s: float) -> dict[str, str]:
        """Return the current figures, by title."""
        self._forget(now_s)
        recent_s = min(RECENT_S, max(now_s - self._started_s, 1e-9))
        p50, p95 = np.percentile(self._ttfts_ms, [50, 95]) if self._ttfts_ms else (None, None)
        return {
            "level": self.title,
            "progress": self._progress(now_s),
            "in flight": str(self.num_in_flight),
            "QPS": f"{len(self._successes) / recent_s:.2f}",
            "tok/s": self._token_rate(recent_s),
            "TTFT p50, ms": "-" if p50 is None else f"{p50:,.0f}",
            "TTFT p95, ms": "-" if p95 is None else f"{p95:,.0f}",
            "errors": self._error_text(),
        }

    def _learn(self, record: RequestRecord) -> None:
        """Note how many tokens an event of an ended answer holds."""
        if record.content_tokens and record.error is None:
            self._num_ended_events += len(record.content_tokens)
            self._num_ended_tokens += sum(record.content_tokens)
            self._tokens_per_event = self._num_ended_tokens / self._num_ended_events

    def _token_rate(self, recent_s: float) -> str:
        per_event = self._tokens_per_event
        uncounted = self._num_recent_uncounted * (1 if per_event is None else per_event)
        bound = "≥ " if per_event is None and uncounted else ""
        return f"{bound}{(self._num_recent_tokens + uncounted) / recent_s:,.1f}"

    def _count(self, num_tokens: int | None, sign: int) -> None:
        """Add an event to the recent ones (sign 1), or take it away again (-1)."""
        if num_tokens is None:
            self._num_recent_uncounted += sign
        else:
            self._num_recent_tokens += sign * num_tokens

    def _progress(self, now_s: float) -> str:
        if self._num_requests:
            done = f"{self.num_ended}/{self._num_requests}"
            return f"{done} ({self.num_ended / self._num_requests:.0%})"
        elapsed_s = max(0.0, now_s - self._started_s)
        if self._duration_s:
            return f"{min(elapsed_s, self._duration_s):.0f}/{self._duration_s:.0f} s"
        return f"{elapsed_s:.0f} s"

    def _error_text(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.errors.most_common(3))
        return kinds or "0"

    def _forget(self, now_s: float) -> None:
        while self._events and self._events[0][0] < now_s - RECENT_S:
            self._count(self._events.popleft()[1], -1)
        while self._successes and self._successes[0] < now_s - RECENT_S:
            self._successes.popleft()


class LiveDisplay(LiveFigures):
    """Shows the figures during a run: `async with LiveDisplay(console, clock): ...`."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        """Prepare to show figures on a console.

        Args:
            console: Shows a table if it is a terminal, lines otherwise.
            clock: The run's clock, in seconds.
        """
        super().__init__()
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start showing."""
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._task = asyncio.create_task(self._show_repeatedly())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Show the final figures and stop."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.show()
        if self._live:
            self._live.stop()

    async def _show_repeatedly(self) -> None:
        interval_s = TABLE_INTERVAL_S if self._live else LINE_INTERVAL_S
        while True:
            await asyncio.sleep(interval_s)
            self.show()

    def show(self) -> None:
        """Show the current figures."""
        row = self.row(self._clock())
        if self._live:
            self._live.update(_table(row, self._console.width), refresh=True)
        else:
            line = " | ".join(f"{title} {value}" for title, value in row.items() if value)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(row: dict[str, str], width: int) -> Table:
    """Arrange the figures in a row, or in a column if the terminal is too narrow."""
    table = Table(show_edge=False, pad_edge=False, show_header=width >= MIN_TABLE_WIDTH)
    if width < MIN_TABLE_WIDTH:
        for title, value in row.items():
            table.add_row(title, value)
        return table
    for title in row:
        table.add_column(title, justify="left" if title in ("level", "errors") else "right")
    table.add_row(*row.values())
    return table
