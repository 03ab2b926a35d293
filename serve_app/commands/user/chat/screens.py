"""Where an answer is shown: as Markdown on a terminal, or as plain text for another program.

A terminal can't take back lines that have left its screen. So each block of an answer, such as a
paragraph, a list or a table, is printed once when the next one begins, and only the last block is
drawn again while it grows, cut to the screen's height.
"""

import re
import time
from types import TracebackType
from typing import Final, Self, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

INTERVAL_S: Final = 0.08
"""Between two drawings."""

MAX_DRAWN: Final = 16_384
"""Characters of an unfinished block that is drawn as Markdown; a longer one is drawn as it is."""

MARGIN: Final = 4
"""Lines of the screen that an unfinished block leaves free."""

CODE_THEME: Final = "ansi_dark"
"""The terminal's own colours, so that code can be read on any background."""

_CONTROLS: Final = re.compile(
    r"[\x00-\x08\x0b-\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters except newline and tab, and those that turn the direction of writing;
and halves of characters, which no terminal can be sent."""


def harmless(text: str) -> str:
    """Return a foreign text without what would command a terminal: escapes and other controls.

    Carriage returns are dropped: a stream may cut one from the newline that follows.
    """
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text.replace("\r", ""))


def markdown(text: str) -> Markdown:
    """Return a text to be printed, made harmless; links show where they lead."""
    shown = Markdown(text, code_theme=CODE_THEME, hyperlinks=False)
    for token in shown.parsed:
        for each in (token, *(token.children or ())):
            each.content = harmless(each.content)  # where entities such as `&#x1b;` are decoded
    return shown


def end_of_finished_blocks(text: str) -> int:
    """Return where the last block of a Markdown text begins; the others change no more."""
    starts = [token.map[0] for token in Markdown(text).parsed if token.map and not token.level]
    if len(starts) < 2:
        return 0
    lines = text.split("\n")
    return sum(len(line) + 1 for line in lines[: starts[-1]])


class TerminalScreen:
    """Draws one answer."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._reasoning = ""
        self._rest = ""
        self._notice = "waiting for the first token"
        self._drawn_s = 0.0

    def __enter__(self) -> Self:
        """Take the lines below the cursor."""
        self._live.start()
        self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Print what is left, whether or not the answer is complete."""
        self._live.stop()
        self._end_reasoning()
        if self._rest:
            self._console.print(markdown(self._rest))

    def add(self, text: str, *, is_reasoning: bool) -> None:
        """Show more of the text."""
        self._notice, text = "", harmless(text)
        if is_reasoning:
            self._reasoning += text
        else:
            self._end_reasoning()
            self._rest += text
        if time.monotonic() - self._drawn_s >= INTERVAL_S:
            self._draw()

    def notice(self, text: str) -> None:
        """Show what the server tells, until the text goes on."""
        self._notice = harmless(text)
        self._draw()

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._console.print(Text(self._reasoning.strip(), style="dim italic"), "")
            self._reasoning = ""

    def _draw(self) -> None:
        is_short = len(self._rest) <= MAX_DRAWN
        if is_short and (end := end_of_finished_blocks(self._rest)):
            self._console.print(markdown(self._rest[:end]), "")
            self._rest = self._rest[end:]
        parts: list[RenderableType] = []
        if self._reasoning:
            parts.append(Text(self._reasoning, style="dim italic"))
        if self._rest:
            parts.append(markdown(self._rest) if is_short else Text(self._rest[-MAX_DRAWN:]))
        if self._notice:
            parts.append(Text(self._notice, style="dim"))
        self._live.update(LastLines(Group(*parts)), refresh=True)
        self._drawn_s = time.monotonic()


class LastLines:
    """The end of something that is higher than the screen."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield as many lines as fit."""
        # A height would be filled up with empty lines.
        lines = console.render_lines(self._whole, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - MARGIN) :]:
            yield from line
            yield Segment.line()


class PlainScreen:
    """Writes one answer as it comes, without reasoning; notices go to standard error."""

    def __init__(self, output: TextIO, notices: TextIO) -> None:
        self._output = output
        self._notices = notices
        self._last = ""

    def add(self, text: str, *, is_reasoning: bool) -> None:
        """Write more of the text."""
        if not is_reasoning:
            # A file gets what the model wrote; a terminal is not to be commanded.
            self._output.write(harmless(text) if self._output.isatty() else text)
            self._output.flush()
            self._last = text[-1]

    def notice(self, text: str) -> None:
        """Write what the server tells."""
        self._notices.write(f"{harmless(text)}\n")
        self._notices.flush()

    def end(self) -> None:
        """End the last line."""
        if self._last not in ("", "\n"):
            self._output.write("\n")
        self._output.flush()
