"""Where the demo is shown: panels side by side on a terminal, or lines for a log."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from serve_app.commands.user.chat.screens import harmless
from serve_app.commands.user.demo.streams import DemoStream

FRAMES_PER_S: Final = 12
PANEL_LINES: Final = 12
SVG_WIDTH: Final = 112
SVG_MARGIN: Final = 2
ID_LENGTH: Final = 17

SVG_FORMAT: Final = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {terminal_width} {terminal_height}" role="img">
<title>raystream demo</title>
<style>
text {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; \
font-size: {char_height}px; white-space: pre; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>{lines}</defs>
<rect fill="#292929" width="{terminal_width}" height="{terminal_height}" rx="8"/>
<g clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""
"""Rich's own format loads a font from another host, and draws a window's buttons."""


class DemoScreen:
    """Shows lines, and below them the streams of a run."""

    def __init__(self, console: Console, *, is_plain: bool) -> None:
        """Show nothing yet.

        Args:
            console: Where it is shown.
            is_plain: Write lines only, for a log or another program.
        """
        self.is_plain = is_plain
        self._console = console
        self._told: list[Text] = []
        self._num_above = 0
        self._streams: Sequence[DemoStream] = ()

    def tell(self, line: str, style: str = "") -> None:
        """Show a line, above the panels if there are any."""
        line = harmless(line)
        self._told.append(Text(line, style=style))
        shown = Text(line, style="" if self.is_plain else style)
        self._console.print(shown, soft_wrap=self.is_plain)

    @contextmanager
    def busy(self, line: str) -> Iterator[None]:
        """Show a line, and that something goes on until the block is left."""
        self.tell(line)
        if self.is_plain:
            yield
        else:
            with self._console.status("this takes a minute or two"):
                yield

    @contextmanager
    def during(self, streams: Sequence[DemoStream], *, stay: bool) -> Iterator[None]:
        """Draw streams until the block is left.

        Args:
            streams: The streams.
            stay: Leave their last state on the screen, and in the picture.
        """
        if self.is_plain:
            yield
        else:
            with Live(
                console=self._console,
                refresh_per_second=FRAMES_PER_S,
                transient=not stay,
                get_renderable=lambda: panels(streams, self._console.width),
            ):
                yield
        self._streams, self._num_above = (streams if stay else ()), len(self._told)

    def save_svg(self, file: Path) -> None:
        """Write a picture of the lines, and of the streams' last state.

        Raises:
            OSError: It can't be written.
        """
        console = Console(record=True, width=SVG_WIDTH, file=io.StringIO(), force_terminal=True)
        above, below = self._told[: self._num_above], self._told[self._num_above :]
        shown = Group(*above, panels(self._streams, SVG_WIDTH - 2 * SVG_MARGIN), *below)
        console.print(Padding(shown, (1, SVG_MARGIN)))
        console.save_svg(str(file), code_format=SVG_FORMAT)


def panels(streams: Sequence[DemoStream], width: int) -> Table:
    """Return the streams side by side."""
    table = Table.grid(expand=True)
    for _ in streams:
        table.add_column(ratio=1)
    each = width // max(1, len(streams)) - 4  # the frame, and a space on both sides
    table.add_row(*(_panel(number, stream, each) for number, stream in enumerate(streams, 1)))
    return table


def _panel(number: int, stream: DemoStream, width: int) -> Panel:
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(f"{stream.question.text}\n", style="bold")
    head.append(f"{harmless(stream.answer_id[:ID_LENGTH]) or 'waiting'}\n", style="dim")
    return Panel(
        Group(head, part_to_show(stream, width)),
        title=f"{number}: {stream.question.how}",
        subtitle=f"{stream.num_tokens} tokens" + (", complete" if stream.finish_reason else ""),
        border_style="yellow" if stream.pauses else "cyan",
        height=PANEL_LINES + 4,
    )


def part_to_show(stream: DemoStream, width: int) -> Text:
    """Return the end of a stream's text, or around its last pause once it is complete."""
    text, end = Text(), 0
    for pause in stream.pauses:
        text.append(harmless(stream.text[end : pause.position]))
        text.append(
            f"\xa0{pause.notice},\xa0{pause.seconds:.2f}\xa0s\xa0", style="#000000 on yellow"
        )
        end = pause.position
    text.append(harmless(stream.text[end:]))
    lines = text.wrap(Console(width=width), width)
    first = max(0, len(lines) - PANEL_LINES)
    if stream.finish_reason and stream.pauses:
        marked = next(i for i in reversed(range(len(lines))) if lines[i].spans)
        first = min(first, max(0, marked - PANEL_LINES // 2))
    return Text("\n").join(lines[first : first + PANEL_LINES])
