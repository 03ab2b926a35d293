"""`make dashboards`: writes the dashboards of k8s/components/monitoring from the panels below.

The panels ask for vLLM's names, as `GET /metrics` shows them, so the same dashboard shows vLLM's
own servers beside ours. A test refuses stale files, and runs every query against a real Prometheus.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as Timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef

FOLDER = Path(__file__).resolve().parent / "components" / "monitoring" / "dashboards"

PROMETHEUS = DataSourceRef(type_val="prometheus", uid="$datasource")
MODEL = 'model_name=~"$model_name"'
RATE = "[$__rate_interval]"
SHARES = (0.5, 0.9, 0.99)
"""The quantiles that the panels of durations show."""

WIDTH, HEIGHT = 8, 7
"""Of a panel, in Grafana's units: 24 are a whole row."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query, and the name of its curves."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves over time.

    Attributes:
        title: The panel's title.
        about: What an operator reads from it.
        unit: Grafana's name of the unit.
        queries: At least one.
    """

    title: str
    about: str
    unit: str
    queries: tuple[Query, ...]


def _sum_rate(name: str, by: str = "model_name", more: str = "") -> str:
    return f"sum by ({by}) (rate({name}{{{MODEL}{more}}}{RATE}))"


def _quantiles(name: str) -> tuple[Query, ...]:
    rate = f"sum by (le, model_name) (rate({name}_bucket{{{MODEL}}}{RATE}))"
    return tuple(
        Query(f"histogram_quantile({share}, {rate})", f"{{{{model_name}}}} p{share * 100:g}")
        for share in SHARES
    )


def _mean(name: str) -> Query:
    return Query(
        f"{_sum_rate(f'{name}_sum')} / {_sum_rate(f'{name}_count')}", "{{model_name}} mean"
    )


def _each_replica(name: str) -> tuple[Query, ...]:
    return (Query(f"{name}{{{MODEL}}}", "{{model_name}} {{replica}}"),)


ROWS: dict[str, Sequence[Panel]] = {
    "What clients see": (
        Panel(
            "Time to first token",
            "From a request's arrival to its first token.",
            "s",
            _quantiles("vllm:time_to_first_token_seconds"),
        ),
        Panel(
            "Inter-token latency",
            "Time between two tokens; each token counts once.",
            "s",
            _quantiles("vllm:inter_token_latency_seconds"),
        ),
        Panel(
            "Whole answer",
            "From a request's arrival to its last token.",
            "s",
            _quantiles("vllm:e2e_request_latency_seconds"),
        ),
        Panel(
            "Complete answers",
            "Answers that ended, by their finish reason.",
            "reqps",
            (
                Query(
                    _sum_rate("vllm:request_success_total", "model_name, finished_reason"),
                    "{{model_name}} {{finished_reason}}",
                ),
            ),
        ),
        Panel(
            "Refused requests",
            "Requests for which there was no room, by the limit that was reached.",
            "reqps",
            (
                Query(
                    _sum_rate("vllm:admission_rejections_total", "model_name, reason"),
                    "{{model_name}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Streams that moved",
            "Requests that another replica took over: theirs was lost, stopped or drained.",
            "reqps",
            (
                Query(
                    _sum_rate("raystream_streams_moved_total", "model_name, reason"),
                    "{{model_name}} {{reason}}",
                ),
            ),
        ),
    ),
    "Load": (
        Panel(
            "Running",
            "Sequences that run on each replica.",
            "none",
            _each_replica("vllm:num_requests_running"),
        ),
        Panel(
            "Waiting",
            "Sequences that wait on each replica.",
            "none",
            _each_replica("vllm:num_requests_waiting"),
        ),
        Panel(
            "Why they wait",
            "For their turn, for KV memory, or because a better claim took their place.",
            "none",
            (
                Query(
                    f"sum by (model_name, reason) (raystream_requests_waiting{{{MODEL}}})",
                    "{{model_name}} {{reason}}",
                ),
            ),
        ),
        Panel(
            "Longest wait",
            "How long the one waits that waits longest on a replica.",
            "s",
            (
                Query(
                    f"max by (model_name) (raystream_longest_wait_seconds{{{MODEL}}})",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Parked streams",
            "Streams that have begun, hold no memory, and wait at the ingresses to go on.",
            "none",
            (
                Query(
                    f"sum by (model_name) (raystream_streams_parked{{{MODEL}}})",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Time parked",
            "From the moment when a stream is parked until it goes on, or ends.",
            "s",
            _quantiles("raystream_parked_seconds"),
        ),
        Panel(
            "KV memory",
            "The part of each replica's KV memory that running sequences hold.",
            "percentunit",
            _each_replica("vllm:kv_cache_usage_perc"),
        ),
        Panel(
            "Where a request's time goes",
            "The mean time in the queue, in prefill and in decode.",
            "s",
            tuple(
                Query(
                    _mean(f"vllm:request_{phase}_time_seconds").expression,
                    f"{{{{model_name}}}} {phase}",
                )
                for phase in ("queue", "prefill", "decode")
            ),
        ),
        Panel(
            "Preemptions",
            "Running sequences that had to wait again because memory ran short.",
            "ops",
            (Query(_sum_rate("vllm:num_preemptions_total"), "{{model_name}}"),),
        ),
        Panel(
            "Memory of replicas",
            "Memory of its device that each replica's process uses.",
            "bytes",
            _each_replica("raystream_replica_memory_bytes"),
        ),
        Panel(
            "Memory of devices",
            "The part of each replica's device that all processes use.",
            "percentunit",
            (
                Query(
                    f"raystream_device_memory_used_bytes{{{MODEL}}} / "
                    f"raystream_device_memory_total_bytes{{{MODEL}}}",
                    "{{model_name}} {{replica}}",
                ),
            ),
        ),
        Panel(
            "Memory warnings",
            "How often memory became short, of a device or of a replica's share.",
            "ops",
            (
                Query(
                    _sum_rate("raystream_memory_warnings_total", "model_name, of"),
                    "{{model_name}} {{of}}",
                ),
            ),
        ),
        Panel(
            "Replicas",
            "Replicas that run.",
            "none",
            (
                Query(
                    f"count by (model_name) (raystream_replica_start_time_seconds{{{MODEL}}})",
                    "{{model_name}}",
                ),
            ),
        ),
    ),
    "Tokens": (
        Panel(
            "Delivered tokens",
            "Tokens on their way to clients.",
            "none",
            (Query(_sum_rate("raystream_delivered_tokens_total"), "{{model_name}}"),),
        ),
        Panel(
            "Tokens of each key",
            "Tokens of prompts and answers, by API key.",
            "none",
            (
                Query(_sum_rate("raystream_prompt_tokens_total", "key"), "{{key}} prompts"),
                Query(_sum_rate("raystream_delivered_tokens_total", "key"), "{{key}} answers"),
            ),
        ),
        Panel(
            "Gap between keys",
            "Weighted tokens between the most and the least served of the keys that wait.",
            "none",
            (
                Query(
                    f"max by (model_name) (raystream_service_gap_tokens{{{MODEL}}})",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Generated and prompt tokens",
            "What replicas generate, and what they are asked.",
            "none",
            (
                Query(_sum_rate("vllm:generation_tokens_total"), "{{model_name}} generated"),
                Query(_sum_rate("vllm:prompt_tokens_total"), "{{model_name}} prompts"),
            ),
        ),
        Panel(
            "Prompts found in memory",
            "The part of prompt tokens that need not be computed again.",
            "percentunit",
            (
                Query(
                    f"{_sum_rate('vllm:prefix_cache_hits_total')} / "
                    f"{_sum_rate('vllm:prefix_cache_queries_total')}",
                    "{{model_name}}",
                ),
            ),
        ),
        Panel(
            "Length of prompts",
            "Tokens of the prompts of complete answers.",
            "none",
            _quantiles("vllm:request_prompt_tokens"),
        ),
        Panel(
            "Length of answers",
            "Tokens of complete answers.",
            "none",
            _quantiles("vllm:request_generation_tokens"),
        ),
    ),
}
"""The panels of the dashboard, by the title of their row."""


def main() -> None:
    """Write all dashboards."""
    for name, text in dashboards().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def dashboards() -> dict[str, str]:
    """Return the JSON of each dashboard, by file name."""
    made = _dashboard().build()
    return {"raystream.json": JSONEncoder(sort_keys=True, indent=2).encode(made) + "\n"}


def _dashboard() -> Dashboard:
    board = (
        Dashboard("raystream")
        .uid("raystream")
        .description("raystream's models, by the metrics that GET /metrics shows.")
        .tags(["raystream", "vllm"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(DatasourceVariable("datasource").type("prometheus").label("Data source"))
        .with_variable(
            QueryVariable("model_name")
            .label("Model")
            .datasource(PROMETHEUS)
            .query("label_values(raystream_streams_moved_total, model_name)")
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for title, panels in ROWS.items():
        board = board.with_row(Row(title))
        for panel in panels:
            board = board.with_panel(_timeseries(panel))
    return board


def _timeseries(panel: Panel) -> Timeseries:
    made = (
        Timeseries()
        .title(panel.title)
        .description(panel.about)
        .unit(panel.unit)
        .min(0)
        .span(WIDTH)
        .height(HEIGHT)
        .datasource(PROMETHEUS)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    for letter, query in zip(ascii_uppercase, panel.queries, strict=False):
        target = Dataquery().ref_id(letter).expr(query.expression).legend_format(query.legend)
        made = made.with_target(target)
    return made


if __name__ == "__main__":
    main()
