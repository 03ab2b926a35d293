"""What `raystream serve` shows until the server is ready: a bar for each replica that starts.

A terminal gets bars, which go when the server is ready; anything else gets a line now and
then, and so does a terminal that can't move its cursor. Both are drawn by a thread, so that nothing
that takes long, such as the start of Ray, is silent.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Event, Thread
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from deployments.contract.telemetry.start_progress import StartReport

Starts = Mapping[str, Sequence[StartReport]]
"""How far starting replicas are, by the name of the deployment."""

DRAW_S: Final = 0.5
LINE_S: Final = 15.0
"""Seconds between two lines where there is no terminal: well within the time after which silence
looks like a fault."""


class StartScreen:
    """Shows how far the start is while it is entered."""

    def __init__(
        self,
        console: Console,
        *,
        started_s: float,
        line_s: float = LINE_S,
        draw_s: float = DRAW_S,
    ) -> None:
        """Show nothing yet.

        Args:
            console: The terminal, or what stands in for it.
            started_s: When the start began (`time.monotonic`).
            line_s: Seconds between two lines where there is no terminal.
            draw_s: Seconds between two pictures of the bars.
        """
        self.awaited: Sequence[str] = ("Ray",)
        """What is awaited: Ray, deployments, the proxy in front."""
        self.read_starts: Callable[[], Starts] = dict
        """Returns how far replicas are, once Ray runs."""
        self._started_s = started_s
        self._console = console
        # Rich draws no bars on a terminal without control of the cursor (TERM=dumb, unknown).
        self._has_bars = console.is_terminal and not console.is_dumb_terminal
        self._wait_s = draw_s if self._has_bars else line_s
        self._is_over = Event()
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[told]}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._has_bars,
        )
        self._tasks: dict[str, TaskID] = {}
        self._thread = Thread(target=self._run, name="start-screen", daemon=True)

    def __enter__(self) -> Self:
        """Begin to show."""
        self._bars.start()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Remove the bars."""
        self._is_over.set()
        self._thread.join()
        self._bars.stop()

    def _run(self) -> None:
        while not self._is_over.wait(self._wait_s):
            told = self.told()
            if self._has_bars:
                self._draw(told)
            else:
                waited_s = time.monotonic() - self._started_s
                names = ", ".join(f"{name} ({how})" if how else name for name, how, _ in told)
                line = f"Still waiting after {waited_s:.0f} s for {names}"
                self._console.out(line, highlight=False)

    def told(self) -> list[tuple[str, str, float | None]]:
        """Return what is awaited: a name, how far it is in words, and the part that is done."""
        starts = self.read_starts()
        found: list[tuple[str, str, float | None]] = []
        for name in self.awaited:
            reports = starts.get(name, ())
            found += [(name, str(each), each.done) for each in reports] or [(name, "", None)]
        return found

    def _draw(self, told: Sequence[tuple[str, str, float | None]]) -> None:
        counts: dict[str, int] = {}
        drawn = set()
        for name, how, done in told:
            counts[name] = counts.get(name, 0) + 1
            title = name if counts[name] == 1 else f"{name} #{counts[name]}"
            drawn.add(title)
            if title not in self._tasks:
                self._tasks[title] = self._bars.add_task(title, total=None, told="")
            self._bars.update(
                self._tasks[title],
                total=None if done is None else 1.0,
                completed=done or 0.0,
                told=how,
            )
        for title in self._tasks.keys() - drawn:
            self._bars.remove_task(self._tasks.pop(title))
