"""The requests of one level as columns, with figures computed from the records' times.

Only successes have latencies; a missing figure is NaN. Tokens and times in flight exist for every
request, however it ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loadtest.results.record import ErrorKind, RequestRecord

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestTable:
    """Columns over the requests of a level and over their content events.

    Attributes:
        records: The requests, in the order of the columns.
        scheduled_s: [num_requests], float64, seconds of the run's clock, as are the next two.
        sent_s: [num_requests].
        ended_s: [num_requests].
        is_success: [num_requests], bool.
        is_cancelled: [num_requests], bool; ended by the tool.
        is_warmup: [num_requests], bool.
        figures: The values of each request metric, [num_requests], in the metric's unit.
        gap_ms: [num_gaps], between neighbouring content events of one request.
        gap_end_s: [num_gaps], when the gap's second event was read.
        gap_request: [num_gaps], the row of the request.
        event_s: [num_events], when each content event of any request was read.
        event_tokens: [num_events], the tokens credited to each event.
    """

    records: tuple[RequestRecord, ...]
    scheduled_s: Floats
    sent_s: Floats
    ended_s: Floats
    is_success: Bools
    is_cancelled: Bools
    is_warmup: Bools
    figures: dict[str, Floats]
    gap_ms: Floats
    gap_end_s: Floats
    gap_request: Ints
    event_s: Floats
    event_tokens: Floats


def tpot_ms(record: RequestRecord) -> float:
    """Compute the time per output token after the first content event, in ms.

    Returns:
        NaN if no tokens came after the first event's.
    """
    if len(record.content_s) < 2:
        return float("nan")
    # An event of unknown token count has at least one, since it carries text.
    num_first = (record.content_tokens[0] if record.content_tokens else 0) or 1
    num_later = record.output_tokens - num_first
    if num_later < 1:
        return float("nan")
    return (record.content_s[-1] - record.content_s[0]) / num_later * 1000.0


def request_figures(record: RequestRecord) -> dict[str, float]:
    """Compute the figures of a successful request, each in its metric's unit."""
    first, last = record.content_s[0], record.content_s[-1]
    gaps = np.diff(record.content_s)
    return {
        "queue_delay": (record.sent_s - record.scheduled_s) * 1000.0,
        "ttft": (first - record.sent_s) * 1000.0,
        "ttft_sched": (first - record.scheduled_s) * 1000.0,
        "tpot": tpot_ms(record),
        "e2e": last - record.sent_s,
        "e2e_sched": last - record.scheduled_s,
        "max_stall": float(gaps.max()) * 1000.0 if gaps.size else float("nan"),
        "tail": (record.ended_s - last) * 1000.0,
    }


REQUEST_METRICS = (
    "queue_delay", "ttft", "ttft_sched", "tpot", "e2e", "e2e_sched", "max_stall", "tail",
)  # fmt: skip


def build_table(records: Sequence[RequestRecord]) -> RequestTable:
    """Turn one level's records into columns, in the order of sending."""
    ordered = tuple(sorted(records, key=lambda record: (record.sent_s, record.index)))
    is_success = np.array([is_successful(record) for record in ordered], dtype=bool)
    gap_ms, gap_end_s, gap_request = _gaps(ordered, is_success)
    return RequestTable(
        records=ordered,
        scheduled_s=np.array([record.scheduled_s for record in ordered]),
        sent_s=np.array([record.sent_s for record in ordered]),
        ended_s=np.array([record.ended_s for record in ordered]),
        is_success=is_success,
        is_cancelled=np.array([r.error is ErrorKind.CANCELLED for r in ordered], dtype=bool),
        is_warmup=np.array([record.is_warmup for record in ordered], dtype=bool),
        figures=_figure_columns(ordered, is_success),
        gap_ms=gap_ms,
        gap_end_s=gap_end_s,
        gap_request=gap_request,
        event_s=_flat([record.content_s for record in ordered]),
        event_tokens=_flat([_tokens_of_events(record) for record in ordered]),
    )


def is_successful(record: RequestRecord) -> bool:
    """Return whether a request succeeded: no error, and some content."""
    return record.error is None and bool(record.content_s)


def _tokens_of_events(record: RequestRecord) -> tuple[int, ...]:
    if len(record.content_tokens) == len(record.content_s):
        return record.content_tokens
    return (1,) * len(record.content_s)


def _figure_columns(records: Sequence[RequestRecord], is_success: Bools) -> dict[str, Floats]:
    columns = {name: np.full(len(records), np.nan) for name in REQUEST_METRICS}
    for row in np.flatnonzero(is_success).tolist():
        for name, value in request_figures(records[row]).items():
            columns[name][row] = value
    return columns


def _gaps(records: Sequence[RequestRecord], is_success: Bools) -> tuple[Floats, Floats, Ints]:
    rows = np.flatnonzero(is_success).tolist()
    gap_ms = _flat([np.diff(records[row].content_s) * 1000.0 for row in rows])
    gap_end_s = _flat([records[row].content_s[1:] for row in rows])
    counts = [len(records[row].content_s) - 1 for row in rows]
    return gap_ms, gap_end_s, np.repeat(np.array(rows, dtype=np.int64), counts)


def _flat(pieces: Sequence[Sequence[float] | Floats]) -> Floats:
    if not pieces:
        return np.empty(0)
    return np.concatenate([np.asarray(piece, dtype=np.float64) for piece in pieces])
