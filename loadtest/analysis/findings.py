"""Describes a run's results, and doubts about them, in sentences; the most important first."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from loadtest.analysis.capacity import capacity_sentences
from loadtest.analysis.load_steps import load_steps
from loadtest.analysis.metric import MIN_SAMPLES_FOR_P99
from loadtest.analysis.objectives import Objective
from loadtest.analysis.request_table import RequestTable
from loadtest.analysis.spans import STEADY_SHARE, Span, count_in_flight
from loadtest.results.record import TokenSource
from loadtest.results.summary import LevelFigures

MAX_LAG_MS = 5.0
MAX_LAG_SHARE = 0.1
MAX_CPU_SHARE = 0.9
MIN_CPU_S = 0.5
"""In a shorter window, a burst of a few answers keeps any client busy and shows nothing."""
MIN_STEADY_SHARE = 0.5
MAX_DELAY_MS = 50.0

TOKEN_SOURCES = {
    TokenSource.USAGE: "Token counts are the server's (usage).",
    TokenSource.EVENTS: "Token counts are the server's, sent with each event.",
    TokenSource.CHUNKS: (
        "The server sent no token counts. Chunks are content events, of any number of tokens."
    ),
}


def find(
    levels: Sequence[LevelFigures],
    tables: Sequence[RequestTable],
    objectives: Sequence[Objective],
    *,
    is_unique: bool = False,
) -> tuple[str, ...]:
    """Return the findings on the levels.

    Args:
        levels: The figures of each level.
        tables: The table of each level, in the same order.
        objectives: The users' objectives.
        is_unique: Whether each question had a prefix of its own.
    """
    return (
        *capacity_sentences(load_steps(levels), objectives),
        *(s for level, table in zip(levels, tables, strict=True) for s in _growth(level, table)),
        *(s for level in levels for s in _client_doubts(level)),
        *(s for level, table in zip(levels, tables, strict=True) for s in _failures(level, table)),
        *(s for level in levels for s in _late_sends(level)),
        *(
            s
            for level, table in zip(levels, tables, strict=True)
            for s in _short_steady_state(level, table)
        ),
        *_oddities(tables),
        *_token_sources(levels),
        *_cached_prompts(levels, is_unique),
        *_few_samples(levels),
    )


def _growth(level: LevelFigures, table: RequestTable) -> list[str]:
    """Report requests that pile up in an open loop: more in flight in its last third than first."""
    window = Span(level.window.started_s, level.window.ended_s)
    if not level.is_open_loop or window.duration_s <= 0 or not level.num_attempts:
        return []
    first = mean_in_flight(table, _part(window, 0, 1 / 3))
    last = mean_in_flight(table, _part(window, 2 / 3, 1))
    if last < 1.5 * first + 2:
        return []
    return [f"At {level.title} the queue grows: {first:.0f}, later {last:.0f} requests in flight."]


def _part(span: Span, start: float, end: float) -> Span:
    return Span(span.started_s + start * span.duration_s, span.started_s + end * span.duration_s)


def mean_in_flight(table: RequestTable, span: Span) -> float:
    """Return the time average of the requests in flight over a span."""
    inside = np.minimum(table.ended_s, span.ended_s) - np.maximum(table.sent_s, span.started_s)
    return float(np.clip(inside, 0, None).sum() / span.duration_s) if span.duration_s else 0.0


def peak_in_flight(table: RequestTable) -> int:
    """Return the most requests in flight at once."""
    _, counts = count_in_flight(table.sent_s, table.ended_s)
    return int(counts.max()) if counts.size else 0


def is_client_bound(level: LevelFigures) -> bool:
    """Return whether the tool itself was too slow for its measurements."""
    lag = level.lag_ms.p99 if level.lag_ms.p99 is not None else level.lag_ms.max
    if level.cpu_share > MAX_CPU_SHARE and level.window.duration_s >= MIN_CPU_S:
        return True
    distributions = level.window.distributions
    figures = [distributions[key].p50 for key in ("ttft_ms", "chunk_gap_ms")]
    smallest = min((figure for figure in figures if figure is not None), default=0.0)
    return lag is not None and lag > MAX_LAG_MS and lag > MAX_LAG_SHARE * smallest


def _client_doubts(level: LevelFigures) -> list[str]:
    if not is_client_bound(level):
        return []
    lag = level.lag_ms.p99 if level.lag_ms.p99 is not None else level.lag_ms.max
    return [
        f"At {level.title} this run measures the client: its event loop woke up to "
        f"{lag or 0:,.1f} ms late and used {level.cpu_share:.0%} of a core. Send from more "
        "processes or a faster machine."
    ]


def _failures(level: LevelFigures, table: RequestTable) -> list[str]:
    sentences = []
    if level.num_errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in level.errors.items())
        sentences.append(
            f"At {level.title} {level.num_errors} of {level.num_attempts} requests failed: "
            f"{kinds}.{_commonest_message(table)}"
        )
    if level.num_cancelled:
        sentences.append(
            f"At {level.title} {level.num_cancelled} requests were cancelled by the tool; they "
            "are not errors, but meet no objective."
        )
    if level.num_warmup_errors:
        sentences.append(
            f"At {level.title} {level.num_warmup_errors} of {level.num_warmup} requests failed "
            "before the window (warm-up and ramp)."
        )
    return sentences


def _commonest_message(table: RequestTable) -> str:
    messages = Counter(
        record.error_message
        for record, cancelled in zip(table.records, table.is_cancelled, strict=True)
        if record.error and not cancelled and record.error_message
    )
    return f' Most often: "{printable(messages.most_common(1)[0][0])}".' if messages else ""


def printable(message: str, max_chars: int = 200) -> str:
    """Make a server's message safe for a terminal: no control characters, limited length."""
    clean = "".join(char if char.isprintable() else " " for char in message)
    return clean if len(clean) <= max_chars else clean[: max_chars - 1] + "…"


def _late_sends(level: LevelFigures) -> list[str]:
    """Report requests that were due while too many were in flight."""
    sentences = []
    delay = level.window.distributions["queue_delay_ms"].p95
    if level.is_open_loop and delay is not None and delay > MAX_DELAY_MS:
        sentences.append(
            f"At {level.title} requests were sent up to {delay:,.0f} ms (p95) late, since too many "
            "were in flight. TTFT and E2E from schedule include that wait."
        )
    if level.num_unsent:
        sentences.append(
            f"At {level.title} {level.num_unsent} requests were due but never sent, since too many "
            "were in flight. They count as missed objectives."
        )
    return sentences


def _short_steady_state(level: LevelFigures, table: RequestTable) -> list[str]:
    if level.is_open_loop or not level.num_attempts:
        return []
    steady_s = level.steady.duration_s if level.steady else 0.0
    if steady_s >= MIN_STEADY_SHARE * level.window.duration_s:
        return []
    peak = peak_in_flight(table)
    is_held_back = peak < STEADY_SHARE * (level.num_queues or 0)
    limit = f"; at most {peak} were in flight at once, so check --max-inflight too"
    return [
        f"At {level.title} all users were busy for only {steady_s:.1f} s of "
        f"{level.window.duration_s:.1f} s: send more requests per user, or for longer"
        f"{limit if is_held_back else ''}."
    ]


def _oddities(tables: Sequence[RequestTable]) -> list[str]:
    """Report what answers had besides their API; the requests of all levels together."""
    records = [record for table in tables for record in table.records]
    counts = Counter(oddity for record in records for oddity in record.oddities)
    if not counts:
        return []
    found = ", ".join(f"{count} with {oddity}" for oddity, count in counts.most_common())
    return [
        f"Of {len(records)} answers some had what the API does not have: {found}. It was read "
        "past; a strict client may fail at it."
    ]


def _token_sources(levels: Sequence[LevelFigures]) -> list[str]:
    sources = {level.token_source for level in levels if level.num_successes}
    if None in sources or len(sources) > 1:
        return ["Answers count their tokens in different ways, so there are no token figures."]
    return [TOKEN_SOURCES[source] for source in sources if source]


def _cached_prompts(levels: Sequence[LevelFigures], is_unique: bool) -> list[str]:
    shares = [level.cached_share for level in levels if level.cached_share is not None]
    highest = max(shares, default=0.0)
    if highest < 0.1:
        return []
    taken = f"The server took up to {highest:.0%} of the prompt tokens from its cache"
    if is_unique:
        return [f"{taken}, although --unique made the questions differ: their prompts begin alike."]
    return [f"{taken}; use --unique to measure it without."]


def _few_samples(levels: Sequence[LevelFigures]) -> list[str]:
    few = [level.title for level in levels if 0 < level.num_successes < MIN_SAMPLES_FOR_P99]
    if not few:
        return []
    titles = ", ".join(dict.fromkeys(few))
    return [f"No p99 for {titles}: fewer than {MIN_SAMPLES_FOR_P99} successes."]
