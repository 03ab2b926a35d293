import io

from rich.console import Console

from loadtest.live_display import LiveDisplay, LiveFigures
from loadtest.observer import Observer
from loadtest.record import ErrorKind
from tests.loadtest.made_runs import made_request


def fed(figures: Observer) -> None:
    """Tell of two requests, one of which fails, and of one that goes on."""
    figures.level_started("4 users", 0.0, num_requests=10, duration_s=None)
    for _ in range(3):
        figures.started(0.0)
    for number in range(5):
        figures.content(0.5 + number / 10, 2, 500.0 if not number else None)
    figures.ended(made_request(0))
    figures.ended(made_request(1, error=ErrorKind.TRUNCATED))


def test_the_row_tells_what_happened() -> None:
    figures = LiveFigures()
    fed(figures)
    row = figures.row(2.0)
    assert row["level"] == "4 users"
    assert row["progress"] == "2/10 (20%)"
    assert (row["in flight"], row["QPS"], row["tok/s"]) == ("1", "0.50", "5.0")
    assert (row["TTFT p50, ms"], row["errors"]) == ("500", "1 truncated")


def test_what_is_long_past_is_forgotten() -> None:
    figures = LiveFigures()
    fed(figures)
    row = figures.row(100.0)
    assert (row["QPS"], row["tok/s"]) == ("0.00", "0.0")


def test_warm_up_counts_only_in_flight() -> None:
    figures = LiveFigures()
    figures.level_started("1 user", 0.0, num_requests=None, duration_s=60)
    figures.started(0.0)
    figures.ended(made_request(is_warmup=True))
    row = figures.row(3.0)
    assert (row["in flight"], row["QPS"], row["progress"]) == ("0", "0.00", "3/60 s")


def test_a_cancelled_request_is_no_error() -> None:
    figures = LiveFigures()
    figures.started(0.0)
    figures.ended(made_request(error=ErrorKind.CANCELLED))
    assert figures.row(1.0)["errors"] == "0"


async def test_a_terminal_sees_a_table() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    async with LiveDisplay(console, lambda: 2.0) as display:
        fed(display)
    assert "in flight" in output.getvalue()
    assert "2/10 (20%)" in output.getvalue()


async def test_a_file_sees_a_line() -> None:
    output = io.StringIO()
    async with LiveDisplay(Console(file=output, width=40), lambda: 2.0) as display:
        fed(display)
    (line,) = output.getvalue().splitlines()
    assert "progress 2/10 (20%) | in flight 1 | QPS 0.50" in line


async def test_a_narrow_terminal_sees_every_figure_whole() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40)
    async with LiveDisplay(console, lambda: 2.0) as display:
        fed(display)
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert "progress │ 2/10 (20%)" in lines
    assert "TTFT p95, ms │ 500" in lines
