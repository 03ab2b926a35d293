"""Computes the figures of one level: counts, percentiles and rates.

`docs/loadtest_metrics.md` defines each of them.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from loadtest.analysis.metric import DISTRIBUTIONS, MIN_SAMPLES_FOR_P99
from loadtest.analysis.objectives import Objective, meets_all
from loadtest.analysis.request_table import Bools, Floats, RequestTable
from loadtest.analysis.spans import Span, measured_window, steady_state
from loadtest.results.record import ErrorKind, LevelRecord, RequestRecord, TokenSource
from loadtest.results.summary import Distribution, LevelFigures, SpanFigures


def distribution(samples: Floats) -> Distribution:
    """Return the percentiles of raw samples [n], ignoring NaN."""
    defined = samples[~np.isnan(samples)]
    if not defined.size:
        return Distribution()
    p50, p90, p95, p99, largest = np.percentile(defined, [50, 90, 95, 99, 100]).tolist()
    is_p99_shown = defined.size >= MIN_SAMPLES_FOR_P99
    return Distribution(
        n=defined.size, p50=p50, p90=p90, p95=p95, p99=p99 if is_p99_shown else None, max=largest
    )


def level_title(level: LevelRecord) -> str:
    """Return a level's title: its users, or its rate."""
    if level.num_queues is None:
        return f"{level.rate_per_s or 0:g} requests/s"
    return "1 user" if level.num_queues == 1 else f"{level.num_queues} users"


def single_source(table: RequestTable) -> TokenSource | None:
    """Return the token source of the successes; None if there are several.

    Without a success, all requests with content are considered, so that chunks are not called
    tokens.
    """
    known = _records_at(table, table.is_success) or [r for r in table.records if r.content_s]
    sources = {record.token_source for record in known}
    return sources.pop() if len(sources) == 1 else None


def sent_in(table: RequestTable, span: Span) -> Bools:
    """Return which requests count for a span: sent in it, and not as warm-up."""
    return np.asarray(~table.is_warmup & span.contains(table.sent_s), dtype=bool)


def samples_of(table: RequestTable, name: str, rows: Bools) -> Floats:
    """Return the raw samples of a distribution over some rows, in the metric's unit."""
    if name == "chunk_gap":
        return table.gap_ms[rows[table.gap_request]]
    values = table.figures[name][rows]
    return values[~np.isnan(values)]


def span_figures(
    table: RequestTable, span: Span, objectives: Sequence[Objective], *, is_open_loop: bool
) -> SpanFigures:
    """Compute the figures of a span."""
    rows = sent_in(table, span)
    ended = ~table.is_warmup & span.contains(table.ended_s)
    is_good = meets_all(table, objectives, is_open_loop=is_open_loop)
    has_tokens = single_source(table) is not None or not table.event_s.size
    tokens = float(table.event_tokens[span.contains(table.event_s)].sum())
    names = [name for name in DISTRIBUTIONS if has_tokens or name != "tpot"]
    return SpanFigures(
        started_s=span.started_s,
        ended_s=span.ended_s,
        duration_s=span.duration_s,
        output_tokens_per_s=_per_second(tokens, span) if has_tokens else None,
        qps=_per_second(float((ended & table.is_success).sum()), span),
        goodput=_per_second(float((ended & is_good).sum()), span) if objectives else None,
        distributions={
            DISTRIBUTIONS[name].key: distribution(samples_of(table, name, rows)) for name in names
        },
    )


def _per_second(amount: float, span: Span) -> float | None:
    return amount / span.duration_s if span.duration_s > 0 else None


def level_figures(
    level: LevelRecord, table: RequestTable, objectives: Sequence[Objective]
) -> LevelFigures:
    """Compute the figures of a level."""
    is_open_loop = level.num_queues is None
    window = measured_window(level, table)
    steady = steady_state(level, table, window)
    rows = sent_in(table, window)
    before = table.is_warmup | (table.sent_s < window.started_s)
    failed = ~table.is_success & ~table.is_cancelled
    good = meets_all(table, objectives, is_open_loop=is_open_loop)
    num_attempts, num_errors = int(rows.sum()), int((rows & failed).sum())
    num_cancelled = int((rows & table.is_cancelled).sum())
    num_ended = num_attempts - num_cancelled
    successes = rows & table.is_success
    return LevelFigures(
        index=level.index,
        title=level_title(level),
        num_queues=level.num_queues,
        rate_per_s=level.rate_per_s,
        repeat=level.repeat,
        token_source=single_source(table),
        num_warmup=int(before.sum()),
        num_warmup_errors=int((before & failed).sum()),
        num_attempts=num_attempts,
        num_successes=int(successes.sum()),
        num_errors=num_errors,
        num_cancelled=num_cancelled,
        num_unsent=level.num_unsent,
        errors=_error_counts(table, rows & failed),
        error_rate=num_errors / num_ended if num_ended else None,
        slo_attainment=_share(good & rows, num_attempts + level.num_unsent) if objectives else None,
        window=span_figures(table, window, objectives, is_open_loop=is_open_loop),
        steady=span_figures(table, steady, objectives, is_open_loop=is_open_loop)
        if steady
        else None,
        output_tokens=_token_counts(table, successes, "output_tokens"),
        prompt_tokens=_token_counts(table, successes, "prompt_tokens"),
        cached_share=_cached_share(table, successes),
        lag_ms=distribution(np.array(level.lag_ms, dtype=np.float64)),
        cpu_share=level.cpu_share,
        was_stopped=level.was_stopped,
    )


def _records_at(table: RequestTable, rows: Bools) -> list[RequestRecord]:
    return [table.records[row] for row in np.flatnonzero(rows)]


def _share(rows: Bools, num_attempts: int) -> float | None:
    return int(rows.sum()) / num_attempts if num_attempts else None


def _error_counts(table: RequestTable, rows: Bools) -> dict[str, int]:
    kinds = Counter(record.error or ErrorKind.EMPTY for record in _records_at(table, rows))
    return {kind.value: kinds[kind] for kind in ErrorKind if kinds[kind]}


def _token_counts(table: RequestTable, rows: Bools, field: str) -> Distribution:
    counts = [getattr(record, field) for record in _records_at(table, rows)]
    return distribution(np.array([n for n in counts if n is not None], dtype=np.float64))


def _cached_share(table: RequestTable, rows: Bools) -> float | None:
    known = [
        (record.cached_tokens, record.prompt_tokens)
        for record in _records_at(table, rows)
        if record.cached_tokens is not None and record.prompt_tokens
    ]
    return sum(cached for cached, _ in known) / sum(all_ for _, all_ in known) if known else None
