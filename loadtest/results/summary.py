"""The models of `summary.json`: the run and, once analysed, its figures, findings and verdict.

The sending side writes `RunHeader`; the analysis adds `RunResults` to the same file and keeps the
rest of it.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from loadtest.results.record import LevelRecord, TokenSource


class Distribution(BaseModel):
    """Percentiles of raw samples, by numpy's linear interpolation; None without samples.

    Attributes:
        n: The number of samples.
        p99: None for fewer than 100 samples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = 0
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class SpanFigures(BaseModel):
    """The figures of a span of time.

    Attributes:
        started_s: The start, on the run's clock.
        ended_s: The end.
        duration_s: The length.
        output_tokens_per_s: Tokens (or chunks) read in the span per second; None if token sources
            are mixed.
        qps: Successes that ended in the span, per second.
        goodput: Those successes that met every SLO, per second; None without SLOs.
        distributions: By metric key (`ttft_ms`), over the successes sent in the span.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    started_s: float
    ended_s: float
    duration_s: float
    output_tokens_per_s: float | None
    qps: float | None
    goodput: float | None
    distributions: dict[str, Distribution]


class LevelFigures(BaseModel):
    """The figures of one level of the sweep.

    Attributes:
        index: As in the `LevelRecord`.
        title: Such as "8 users" or "4 requests/s".
        num_queues: As in the `LevelRecord`.
        rate_per_s: As in the `LevelRecord`.
        repeat: As in the `LevelRecord`.
        token_source: The source of the successes' token counts (without a success, of all requests
            with content). None if no request had content, or if sources are mixed: then there are
            no token figures.
        num_warmup: Requests sent before the window: warm-up and ramp.
        num_warmup_errors: How many of those requests failed.
        num_attempts: All requests sent in the window, including cancelled ones.
        num_successes: Attempts that succeeded.
        num_errors: Attempts that failed.
        num_cancelled: Attempts that the tool ended.
        num_unsent: Requests due before the deadline and never sent, since too many were in flight;
            not attempts.
        errors: The number of failures of each kind.
        error_rate: num_errors / attempts not cancelled; None if all were cancelled.
        slo_attainment: Attempts that met every SLO / (num_attempts + num_unsent), since a request
            that was never sent got no answer either; None without SLOs.
        window: The figures over the window.
        steady: The figures over the steady state; None in an open loop or without a steady state.
        output_tokens: Output tokens of each success.
        prompt_tokens: Prompt tokens of each success, by the server's count.
        cached_share: The share of prompt tokens from the server's cache; None if it sends no count.
        lag_ms: How late the tool's event loop woke.
        cpu_share: The tool's CPU time per second; 1 is one core.
        was_stopped: Whether a signal ended the level early.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    title: str
    num_queues: int | None
    rate_per_s: float | None
    repeat: int
    token_source: TokenSource | None
    num_warmup: int
    num_warmup_errors: int
    num_attempts: int
    num_successes: int
    num_errors: int
    num_cancelled: int
    num_unsent: int
    errors: dict[str, int]
    error_rate: float | None
    slo_attainment: float | None
    window: SpanFigures
    steady: SpanFigures | None
    output_tokens: Distribution
    prompt_tokens: Distribution
    cached_share: float | None
    lag_ms: Distribution
    cpu_share: float
    was_stopped: bool

    @property
    def is_open_loop(self) -> bool:
        """Whether requests were sent at a rate, not by queues."""
        return self.num_queues is None

    @property
    def token_word(self) -> str:
        """The word "tokens", or "chunks" if the server counted no tokens."""
        return "chunks" if self.token_source is TokenSource.CHUNKS else "tokens"


class Outcome(BaseModel):
    """The verdict on a run.

    Attributes:
        exit_code: 0 passed; 1 too many errors, or no success; 99 a threshold was crossed.
        sentences: The reasons, at least one for each check that was made.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    exit_code: Literal[0, 1, 99] = 0
    sentences: tuple[str, ...] = ()


class RunHeader(BaseModel):
    """The part of the summary that the sending side writes.

    Attributes:
        schema_version: The version of the run's files.
        status: "running", "finished" or "stopped".
        started_at: The date and time of the start.
        configuration: The whole configuration, without secrets.
        machine: The machine that sent the load.
        levels: The levels that have begun.
        gpus: The GPU samples, each with its time, `t_s`.
    """

    model_config = ConfigDict(frozen=True, extra="allow")

    schema_version: int
    status: str
    started_at: str = ""
    configuration: dict[str, JsonValue] = {}
    machine: dict[str, JsonValue] = {}
    levels: tuple[LevelRecord, ...] = ()
    gpus: tuple[dict[str, JsonValue], ...] = ()


class RunResults(BaseModel):
    """The part of the summary that the analysis adds.

    Attributes:
        status: "finished"; "stopped" by a signal; or "interrupted", if the tool ended early.
        results: One for each level, in order.
        findings: The findings on the run, in sentences; the most important first.
        verdict: Whether the run passed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Literal["finished", "stopped", "interrupted"]
    results: tuple[LevelFigures, ...]
    findings: tuple[str, ...]
    verdict: Outcome
