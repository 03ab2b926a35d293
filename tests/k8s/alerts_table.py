"""`make table`: writes the alerts and their runbooks into docs/operating.md.

A test fails if the document's table differs.
"""

from typing import Any, Final

import yaml

from tests.made_table import ROOT, MadeTable

RULES: Final = ROOT / "k8s/components/monitoring/alerts/raystream.yaml"
HEADER: Final = "| alert | severity | what to do |\n| --- | --- | --- |\n"


def table() -> str:
    """Return the table in Markdown."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return HEADER + "".join(
        _row(rule) for group in groups for rule in group["rules"] if "alert" in rule
    )


def _row(rule: dict[str, Any]) -> str:
    severity = rule["labels"]["severity"]
    return f"| {rule['alert']} | {severity} | {rule['annotations']['runbook'].strip()} |\n"


TABLE: Final = MadeTable("docs/operating.md", "alerts", table)

if __name__ == "__main__":
    TABLE.write()
