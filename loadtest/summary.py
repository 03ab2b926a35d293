"""What `summary.json` holds: what was run and, once analysed, figures, sentences and a verdict.

The sending side writes `RunHeader`; the analysing side adds `RunResults` to the same file and
leaves the rest of it as it was.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from loadtest.record import LevelRecord, TokenSource


class Distribution(BaseModel):
    """Percentiles of raw samples, numpy's linear ones; None where there are none.

    Attributes:
        n: How many samples.
        p99: None under 100 samples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n: int = 0
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None
    max: float | None = None


class SpanFigures(BaseModel):
    """What a span of time shows.

    Attributes:
        started_s: Where it begins, on the run's clock.
        ended_s: Where it ends.
        duration_s: Its length.
        output_tokens_per_s: Tokens (or chunks) read in it, by its length; None where sources mix.
        qps: Successes that ended in it, by its length.
        goodput: Those of them that met every SLO, by its length; None without SLOs.
        distributions: By a metric's key (`ttft_ms`), over the successes sent in it.
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
    """What one level of the sweep shows.

    Attributes:
        index: The `LevelRecord`'s.
        title: Such as "8 users" or "4 requests/s".
        num_queues: As the level's.
        rate_per_s: As the level's.
        repeat: As the level's.
        token_source: Where the successes' token counts come from (without a success, those of
            what had content); None if nothing had any, or if they come from different places:
            then no figure of tokens is given.
        num_warmup: Requests sent before the window: warm-up and ramp.
        num_warmup_errors: Those of them that failed.
        num_attempts: All sent in the window, cancelled ones included.
        num_successes: Those that ended well.
        num_errors: Those that failed.
        num_cancelled: Those that the tool ended.
        num_unsent: Due before the deadline, but too many were in flight; no attempts.
        errors: How many failed of each kind.
        error_rate: num_errors by those not cancelled; None if all were.
        slo_attainment: Those that met every SLO, by num_attempts and num_unsent, for who was never
            sent got no answer either; None without SLOs.
        window: The figures over the window.
        steady: Over the steady state; None in an open loop or where there is none.
        output_tokens: How many a success had.
        prompt_tokens: How many a success had, as the server counted.
        cached_share: Of all prompt tokens, those the server had from earlier; None if not told.
        lag_ms: How late the tool's event loop woke.
        cpu_share: The tool's CPU time per second; 1 is one core.
        was_stopped: A signal ended the level early.
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
        """Tell whether requests came by a rate, not by queues."""
        return self.num_queues is None

    @property
    def token_word(self) -> str:
        """Name what is counted: "chunks" where nobody counted tokens."""
        return "chunks" if self.token_source is TokenSource.CHUNKS else "tokens"


class Verdict(BaseModel):
    """Whether the run is what was asked for.

    Attributes:
        exit_code: 0 fine; 1 too many errors, or no success; 99 a threshold was crossed.
        sentences: Why, a line for each thing that was asked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    exit_code: Literal[0, 1, 99] = 0
    sentences: tuple[str, ...] = ()


class RunHeader(BaseModel):
    """What the sending side writes, as `run_files` does.

    Attributes:
        schema_version: Of the run's files.
        status: "running", "finished" or "stopped".
        started_at: The date and time.
        configuration: The whole of it, without secrets.
        machine: What the tool ran on.
        levels: Those that have begun.
        gpus: What was seen of GPUs, each sample with its time, `t_s`.
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
    """What the analysing side adds.

    Attributes:
        status: "finished", "stopped" by a signal, or "interrupted": the tool itself ended early.
        results: One for each level, in order.
        findings: What the run shows, in plain sentences; the most important first.
        verdict: Whether it is what was asked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    status: Literal["finished", "stopped", "interrupted"]
    results: tuple[LevelFigures, ...]
    findings: tuple[str, ...]
    verdict: Verdict
