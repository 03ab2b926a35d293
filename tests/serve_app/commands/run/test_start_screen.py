import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from deployments.contract.telemetry.start_progress import StartPhase, StartReport
from serve_app.commands.run.start_screen import StartScreen
from tests.ray.serve_run import wait_until

DEADLINE_S = 30
HALF = StartReport("r1", StartPhase.DOWNLOADING, 0.0, 0.0, 5 * 10**8, 10**9, 1e8, 1, 2)
PREPARING = StartReport("r2", StartPhase.PREPARING, 0.0, 0.0)


def shown(screen: StartScreen, out: io.StringIO, condition: Callable[[str], bool]) -> str:
    """Show until a condition holds for what is shown; return that."""
    with screen:
        wait_until(lambda: condition(out.getvalue()), DEADLINE_S, poll_s=0.001)
        return out.getvalue()


def test_without_a_terminal_a_line_now_and_then_says_what_is_awaited_and_how_far_it_is() -> None:
    out = io.StringIO()
    screen = StartScreen(Console(file=out, width=40), started_s=0, line_s=0.001)
    assert re.fullmatch(
        r"(Still waiting after \d+ s for Ray\n)+", shown(screen, out, lambda text: "\n" in text)
    )
    screen = StartScreen(Console(file=out, width=40), started_s=0, line_s=0.001)
    screen.awaited = ("chat", "Ingress")
    screen.read_starts = lambda: {"chat": (HALF,)}
    text = shown(screen, out, lambda text: "Ingress" in text)
    # However long, it is one line.
    assert " s for chat (downloading 0.50 of 1.00 GB, 1 of 2 files, 100.0 MB/s), Ingress\n" in text


def test_a_terminal_gets_a_bar_for_each_replica_that_goes_at_the_end() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    screen = StartScreen(console, started_s=0, draw_s=0.001)
    screen.awaited = ("chat", "Ingress")
    screen.read_starts = lambda: {"chat": (HALF, PREPARING)}
    text = shown(screen, out, lambda text: "chat #2" in text and "Ingress" in text)
    assert "downloading 0.50 of 1.00 GB, 1 of 2 files, 100.0 MB/s" in text
    assert "━" in text
    assert out.getvalue().endswith("\x1b[2K")  # the lines are erased


def test_what_is_no_longer_awaited_has_no_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    screen = StartScreen(console, started_s=0)
    screen.awaited = ("chat", "Ingress")
    screen._draw(screen.told())
    screen.awaited = ("Ingress",)
    screen._draw(screen.told())
    assert [task.description for task in screen._bars.tasks] == ["Ingress"]


@pytest.mark.parametrize("term", ["dumb", "unknown"])
def test_a_terminal_that_can_t_move_its_cursor_gets_lines(term: str) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, _environ={"TERM": term})
    screen = StartScreen(console, started_s=0, line_s=0.001)
    assert "Still waiting" in shown(screen, out, lambda text: "\n" in text)
