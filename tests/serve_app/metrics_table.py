"""`make table`: writes the table of docs/metrics.md from the definitions of the metrics.

A test fails if the document's table differs.
"""

from deployments.contract.telemetry.metric_store import Metric
from deployments.contract.telemetry.metric_table import GENERATOR, POOLER
from serve_app.metrics import INGRESS
from tests.made_table import MadeTable

HEADER = "| name | kind | labels | who has it | what it is |\n|---|---|---|---|---|\n"
OWNERS = (("text", GENERATOR), ("classifier", POOLER), ("ingress", INGRESS))


def table() -> str:
    """Return the table in Markdown."""
    metrics = {metric.name: metric for _, those in OWNERS for metric in those}
    return HEADER + "".join(_row(metrics[name]) for name in sorted(metrics))


def _row(metric: Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    if metric.values:
        labels += f" ({', '.join(metric.values)})"
    owners = ", ".join(owner for owner, those in OWNERS if metric in those)
    name = f"`{metric.exposed_name}`"
    return f"| {name} | {metric.kind} | {labels} | {owners} | {metric.description} |\n"


TABLE = MadeTable("docs/metrics.md", "metrics", table)

if __name__ == "__main__":
    TABLE.write()
