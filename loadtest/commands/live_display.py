"""What is seen while a run goes on: a table on a terminal, a line every five seconds elsewhere.

It is told what happens between two reads of a socket, so it only counts; what it shows is made at
most four times a second, by a task of its own.
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

from loadtest.record import ErrorKind, RequestRecord

RECENT_S = 10.0
TABLE_INTERVAL_S = 0.25
LINE_INTERVAL_S = 5.0
MAX_TTFTS = 10_000
MIN_TABLE_WIDTH = 100
"""Columns of a terminal that all figures need beside each other."""


class LiveFigures:
    """Counts what happens: an `Observer` that can be asked for a row of figures."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.title = ""
        self.num_in_flight = 0
        self.level_started("", 0.0, num_requests=None, duration_s=None)

    def level_started(
        self, title: str, now_s: float, *, num_requests: int | None, duration_s: float | None
    ) -> None:
        """Begin anew; what is in flight stays so."""
        self.title = title
        self._started_s = now_s
        self._num_requests = num_requests
        self._duration_s = duration_s
        self.num_ended = 0
        self.errors: Counter[str] = Counter()
        self._tokens: deque[tuple[float, int]] = deque()
        self._num_recent_tokens = 0
        self._successes: deque[float] = deque()
        self._ttfts_ms: deque[float] = deque(maxlen=MAX_TTFTS)

    def started(self, now_s: float) -> None:
        """Count a request that is being sent."""
        self.num_in_flight += 1

    def content(self, now_s: float, num_tokens: int, ttft_ms: float | None) -> None:
        """Count a content event."""
        self._tokens.append((now_s, num_tokens))
        self._num_recent_tokens += num_tokens
        if ttft_ms is not None:
            self._ttfts_ms.append(ttft_ms)
        self._forget(now_s)

    def ended(self, record: RequestRecord) -> None:
        """Count a request that ended; warm-up only leaves what is in flight."""
        self.num_in_flight -= 1
        if record.is_warmup:
            return
        self.num_ended += 1
        if record.error is None:
            self._successes.append(record.ended_s)
        elif record.error is not ErrorKind.CANCELLED:
            self.errors[record.error.value] += 1

    def row(self, now_s: float) -> dict[str, str]:
        """Say what there is to see, by title."""
        self._forget(now_s)
        recent_s = min(RECENT_S, max(now_s - self._started_s, 1e-9))
        p50, p95 = np.percentile(self._ttfts_ms, [50, 95]) if self._ttfts_ms else (None, None)
        return {
            "level": self.title,
            "progress": self._progress(now_s),
            "in flight": str(self.num_in_flight),
            "QPS": f"{len(self._successes) / recent_s:.2f}",
            "tok/s": f"{self._num_recent_tokens / recent_s:,.1f}",
            "TTFT p50, ms": "-" if p50 is None else f"{p50:,.0f}",
            "TTFT p95, ms": "-" if p95 is None else f"{p95:,.0f}",
            "errors": self._error_text(),
        }

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
        while self._tokens and self._tokens[0][0] < now_s - RECENT_S:
            self._num_recent_tokens -= self._tokens.popleft()[1]
        while self._successes and self._successes[0] < now_s - RECENT_S:
            self._successes.popleft()


class LiveDisplay(LiveFigures):
    """Shows the figures while a run goes on: `async with LiveDisplay(console, clock): ...`."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        """Show nothing yet.

        Args:
            console: Where to; a table if it is a terminal, lines otherwise.
            clock: The run's clock, in seconds.
        """
        super().__init__()
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Begin to show."""
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        self._task = asyncio.create_task(self._show_again_and_again())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Show the last figures and end."""
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])
        self.show()
        if self._live:
            self._live.stop()

    async def _show_again_and_again(self) -> None:
        interval_s = TABLE_INTERVAL_S if self._live else LINE_INTERVAL_S
        while True:
            await asyncio.sleep(interval_s)
            self.show()

    def show(self) -> None:
        """Show the figures of now."""
        row = self.row(self._clock())
        if self._live:
            self._live.update(_table(row, self._console.width), refresh=True)
        else:
            line = " | ".join(f"{title} {value}" for title, value in row.items() if value)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _table(row: dict[str, str], width: int) -> Table:
    """Put the figures beside each other, or below each other where that is too narrow."""
    table = Table(show_edge=False, pad_edge=False, show_header=width >= MIN_TABLE_WIDTH)
    if width < MIN_TABLE_WIDTH:
        for title, value in row.items():
            table.add_row(title, value)
        return table
    for title in row:
        table.add_column(title, justify="left" if title in ("level", "errors") else "right")
    table.add_row(*row.values())
    return table
