import io

import pytest
from rich.console import Console

from loadtest.analysis.level_figures import level_figures
from loadtest.analysis.request_table import build_table
from loadtest.client.observer import Observer
from loadtest.commands.live_display import LiveDisplay, LiveFigures
from loadtest.results.record import ErrorKind, TokenSource
from tests.loadtest.made_runs import made_level, made_request


def fed(figures: Observer) -> None:
    """Report two requests that end, one of them with an error, and one that goes on."""
    figures.level_started("4 users", 0.0, num_requests=10, duration_s=None)
    for _ in range(3):
        figures.started(0.0)
    for number in range(5):
        figures.content(0.5 + number / 10, 2, 500.0 if not number else None)
    figures.ended(made_request(0))
    figures.ended(made_request(1, error=ErrorKind.TRUNCATED))


def test_the_row_shows_the_counted_events() -> None:
    figures = LiveFigures()
    fed(figures)
    row = figures.row(2.0)
    assert row["level"] == "4 users"
    assert row["progress"] == "2/10 (20%)"
    assert (row["in flight"], row["QPS"], row["tok/s"]) == ("1", "0.50", "5.0")
    assert (row["TTFT p50, ms"], row["errors"]) == ("500", "1 truncated")


def test_old_events_are_forgotten() -> None:
    figures = LiveFigures()
    fed(figures)
    row = figures.row(100.0)
    assert (row["QPS"], row["tok/s"]) == ("0.00", "0.0")


def test_warm_up_counts_only_as_in_flight() -> None:
    figures = LiveFigures()
    figures.level_started("1 user", 0.0, num_requests=None, duration_s=60)
    figures.started(0.0)
    figures.ended(made_request(is_warmup=True))
    row = figures.row(3.0)
    assert (row["in flight"], row["QPS"], row["progress"]) == ("0", "0.00", "3/60 s")


def test_a_cancelled_request_is_not_an_error() -> None:
    figures = LiveFigures()
    figures.started(0.0)
    figures.ended(made_request(error=ErrorKind.CANCELLED))
    assert figures.row(1.0)["errors"] == "0"


@pytest.mark.parametrize("source", list(TokenSource))
def test_the_token_rate_is_the_summary_s(source: TokenSource) -> None:
    """Half of the answers have ended; the others have sent as many events."""
    per_event = 1 if source is TokenSource.CHUNKS else 4
    level, records = made_level(
        8, loops=2, ttft_s=0.2, num_events=10, source=source, tokens_per_event=per_event
    )
    figures = LiveFigures()
    figures.level_started("8 users", level.started_s, num_requests=16, duration_s=None)
    known = per_event if source is TokenSource.EVENTS else None
    events = [(at_s, record) for record in records for at_s in record.content_s]
    for at_s, record in sorted(events, key=lambda event: event[0]):
        figures.content(at_s, known, None)
        if at_s == record.content_s[-1] and record.index < 8:
            figures.ended(record)
    summary = level_figures(level, build_table(records), ()).window
    assert summary.output_tokens_per_s is not None
    assert figures.row(summary.ended_s)["tok/s"] == f"{summary.output_tokens_per_s:,.1f}"


def test_before_an_answer_has_ended_its_tokens_are_a_lower_bound() -> None:
    figures = LiveFigures()
    figures.level_started("1 user", 0.0, num_requests=None, duration_s=60)
    assert figures.row(1.0)["tok/s"] == "0.0"
    figures.content(1.0, None, 500.0)
    assert figures.row(2.0)["tok/s"] == "≥ 0.5"
    figures.ended(made_request(error=ErrorKind.TRUNCATED, tokens_per_event=2))
    assert figures.row(2.0)["tok/s"] == "≥ 0.5"
    figures.ended(made_request(tokens_per_event=4))
    assert figures.row(2.0)["tok/s"] == "2.0"
    figures.level_started("2 users", 10.0, num_requests=None, duration_s=60)
    figures.content(11.0, None, 500.0)
    assert figures.row(12.0)["tok/s"] == "2.0"


async def test_a_terminal_shows_a_table() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=120)
    async with LiveDisplay(console, lambda: 2.0) as display:
        fed(display)
    assert "in flight" in output.getvalue()
    assert "2/10 (20%)" in output.getvalue()


async def test_a_file_gets_lines() -> None:
    output = io.StringIO()
    async with LiveDisplay(Console(file=output, width=40), lambda: 2.0) as display:
        fed(display)
    (line,) = output.getvalue().splitlines()
    assert "progress 2/10 (20%) | in flight 1 | QPS 0.50" in line


async def test_a_narrow_terminal_shows_every_figure_in_full() -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=40)
    async with LiveDisplay(console, lambda: 2.0) as display:
        fed(display)
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert "progress │ 2/10 (20%)" in lines
    assert "TTFT p95, ms │ 500" in lines
