"""The names, units and titles of all figures.

`report.html`, `summary.csv`, `--fail-if`, `--slo` and `compare` use these. Times are stored in the
units in which they are printed; expressions are always in milliseconds.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A named figure.

    Attributes:
        name: The name in expressions.
        unit: The printed unit; "" for a share.
        title: The name for people.
        meaning: How the figure is computed, in one line.
        is_better_high: Whether higher is better.
    """

    name: str
    unit: str
    title: str
    meaning: str
    is_better_high: bool = False

    @property
    def key(self) -> str:
        """The name with its unit, as used in files."""
        suffix = {"ms": "_ms", "s": "_s", "ms/token": "_ms", "tok/s": "_tokens_per_s"}
        return self.name + suffix.get(self.unit, "")

    @property
    def ms_per_unit(self) -> float:
        """The factor that converts the unit to ms, the unit of expressions."""
        return 1000.0 if self.unit == "s" else 1.0


DISTRIBUTIONS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("queue_delay", "ms", "Queue delay", "sent - scheduled; 0 in a closed loop"),
        Metric("ttft", "ms", "TTFT", "first content - sent"),
        Metric("ttft_sched", "ms", "TTFT from schedule", "first content - scheduled"),
        Metric("tpot", "ms/token", "TPOT", "time per output token after the first event"),
        Metric("e2e", "s", "E2E", "last content - sent"),
        Metric("e2e_sched", "s", "E2E from schedule", "last content - scheduled"),
        Metric("chunk_gap", "ms", "Chunk gap", "between content events, pooled over requests"),
        Metric("max_stall", "ms", "Longest stall", "the largest chunk gap of a request"),
        Metric("tail", "ms", "Tail", "end of stream - last content"),
    )
}
"""Figures of requests or events, reported as percentiles."""

SCALARS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("output", "tok/s", "Output", "tokens read in the window / window", True),
        Metric("qps", "1/s", "QPS", "successes that ended in the window / window", True),
        Metric("goodput", "1/s", "Goodput", "successes that met every SLO / window", True),
        Metric("slo_attainment", "", "SLO attainment", "good requests / all attempts", True),
        Metric("error_rate", "", "Error rate", "errors / attempts that were not cancelled"),
    )
}
"""Figures of a level, one number each."""

STATISTICS = ("p50", "p90", "p95", "p99", "max")
MIN_SAMPLES_FOR_P99 = 100


def headline_name(name: str, *, is_open_loop: bool) -> str:
    """Return the figure to judge by: with a rate, the one from the scheduled time.

    A slow server delays later requests; counted from sending, that wait would be lost (coordinated
    omission).
    """
    return f"{name}_sched" if is_open_loop and name in ("ttft", "e2e") else name
