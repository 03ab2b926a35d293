"""Makes runs of known timing, as the sending side would write them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.results.record import ErrorKind, LevelRecord, RequestRecord, TokenSource
from loadtest.results.run_files import RunFiles

CONFIGURATION: dict[str, Any] = {
    "url": "http://127.0.0.1:8000/v1/chat/completions",
    "api": "openai-chat",
    "model": "pydoc-chat",
    "max_error_rate": 0.0,
}
MACHINE: dict[str, Any] = {"hostname": "bench-1", "python": "3.11.2", "num_cpus": 2}


def made_request(
    index: int = 0,
    *,
    level: int = 0,
    queue: int | None = 0,
    sent_s: float = 0.0,
    delay_s: float = 0.0,
    ttft_s: float = 0.5,
    gap_s: float = 0.1,
    num_events: int = 5,
    tail_s: float = 0.01,
    error: ErrorKind | None = None,
    error_message: str | None = None,
    is_warmup: bool = False,
    source: TokenSource = TokenSource.USAGE,
    tokens_per_event: int = 1,
) -> RequestRecord:
    """Make a request whose content events are evenly spaced."""
    content_s = tuple(sent_s + ttft_s + gap_s * number for number in range(num_events))
    return RequestRecord(
        level=level,
        index=index,
        queue=queue,
        is_warmup=is_warmup,
        question=0,
        scheduled_s=sent_s - delay_s,
        sent_s=sent_s,
        headers_s=sent_s + ttft_s / 2,
        content_s=content_s,
        content_tokens=(tokens_per_event,) * num_events,
        content_chars=(4,) * num_events,
        ended_s=(content_s[-1] if content_s else sent_s + ttft_s) + tail_s,
        error=error,
        error_message=error_message,
        http_status=200,
        finish_reason=None if error else "stop",
        prompt_tokens=20,
        output_tokens=tokens_per_event * num_events,
        token_source=source,
        received_bytes=100,
    )


def made_level(
    num_queues: int = 4,
    *,
    index: int = 0,
    started_s: float = 0.0,
    loops: int = 10,
    ttft_s: float = 0.5,
    gap_s: float = 0.05,
    num_events: int = 10,
    repeat: int = 0,
    lag_ms: Sequence[float] = (0.2, 0.3, 0.4),
    cpu_share: float = 0.1,
    **request: Any,
) -> tuple[LevelRecord, list[RequestRecord]]:
    """Make a closed-loop level: each queue sends the next request 1 ms after the last one's end."""
    records = []
    for queue in range(num_queues):
        sent_s = started_s
        for loop in range(loops):
            record = made_request(
                loop * num_queues + queue,
                level=index,
                queue=queue,
                sent_s=sent_s,
                ttft_s=ttft_s * (1 + 0.01 * loop),
                gap_s=gap_s,
                num_events=num_events,
                **request,
            )
            records.append(record)
            sent_s = record.ended_s + 0.001
    level = LevelRecord(
        index=index,
        repeat=repeat,
        num_queues=num_queues,
        started_s=started_s,
        warm_s=started_s,
        ended_s=max(record.ended_s for record in records),
        lag_ms=tuple(lag_ms),
        cpu_share=cpu_share,
    )
    return level, sorted(records, key=lambda record: record.ended_s)


def write_run(
    directory: Path,
    levels: Sequence[tuple[LevelRecord, Sequence[RequestRecord]]],
    configuration: Mapping[str, Any] | None = None,
    status: str = "finished",
) -> Path:
    """Write a run as the sending side does."""
    files = RunFiles(directory, CONFIGURATION | dict(configuration or {}), MACHINE)
    for _, records in levels:
        for record in records:
            files.add(record)
    files.write_summary(status, [level for level, _ in levels])
    files.close()
    return directory


def sweep(queues: Sequence[int] = (1, 2, 4), **level: Any) -> list[Any]:
    """Make consecutive levels whose TTFT grows with their users."""
    made: list[tuple[LevelRecord, list[RequestRecord]]] = []
    for index, num_queues in enumerate(queues):
        started_s = made[-1][0].ended_s + 1.0 if made else 0.0
        ttft_s = 0.1 * num_queues
        made.append(
            made_level(num_queues, index=index, started_s=started_s, ttft_s=ttft_s, **level)
        )
    return made
