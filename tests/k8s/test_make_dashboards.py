import json
import re

import pytest
import yaml

from deployments.contract.telemetry.metric_store import Kind
from k8s.make_base import ALERTS
from k8s.make_dashboards import FOLDER, dashboards
from serve_app.metrics import ALL
from tests.prometheus import check_rules

RULES = ALERTS
EXPOSED = {metric.exposed_name: metric for metric in ALL.values()}
RECORDED = re.compile(r"\braystream:\w+:\w+")
NAME = re.compile(r"\b(?:vllm:|raystream_)\w+")


def expressions() -> list[str]:
    """Return all queries of the dashboards and of the rules."""
    boards = [json.loads(text) for text in dashboards().values()]
    panels = [panel for board in boards for panel in board["panels"]]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    return queries + [rule["expr"] for group in document["groups"] for rule in group["rules"]]


def test_the_dashboards_are_what_make_dashboards_writes() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert written == dashboards(), "run `make dashboards`"


def test_queries_ask_only_for_metrics_that_exist() -> None:
    for expression in expressions():
        for name in NAME.findall(expression):
            base = re.sub(r"_(bucket|sum|count)$", "", name)
            is_series = base != name and EXPOSED[base].kind is Kind.HISTOGRAM
            assert is_series or name in EXPOSED, name


def test_every_metric_of_text_models_and_ingresses_is_shown() -> None:
    shown = " ".join(expressions())
    unshown = {name for name in EXPOSED if name not in shown}
    assert unshown == {
        # Only of servers with `jobs.folder`.
        "raystream_batch_lines_total",
        "raystream_batches_running",
        # Only of models with `light_sleep_after_s`; `/v1/devices` tells them by replica.
        "raystream_replica_asleep",
        "raystream_replica_asleep_memory_bytes",
        "raystream_replica_last_wake_seconds",
        # Only of poolers, or of no use as a curve.
        "raystream_batch_sequences",
        "raystream_batch_tokens",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_time_per_output_token_seconds",
    }


def test_targets_of_a_panel_have_names_of_their_own() -> None:
    for text in dashboards().values():
        for panel in json.loads(text)["panels"]:
            names = [target["refId"] for target in panel.get("targets", ())]
            assert len(set(names)) == len(names)
            assert all(names)


def test_recorded_ratios_are_those_that_alerts_use() -> None:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    rules = [rule for group in document["groups"] for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    used = {name for rule in rules for name in RECORDED.findall(rule["expr"])}
    assert used == recorded


def test_each_alert_says_what_to_do() -> None:
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    for group in document["groups"]:
        for rule in group["rules"]:
            if "alert" in rule:
                assert rule["labels"]["severity"] in ("page", "ticket")
                assert rule["annotations"].keys() == {"summary", "runbook"}


def test_the_objective_s_limit_is_a_bucket_s_bound() -> None:
    text = RULES.read_text(encoding="utf-8")
    bounds = {float(bound) for bound in re.findall(r'le="([^"]+)"', text)}
    assert len(bounds) == 1
    assert bounds <= set(EXPOSED["vllm:time_to_first_token_seconds"].buckets)


@pytest.mark.prometheus
def test_promtool_accepts_the_rules() -> None:
    assert check_rules(RULES) == ""
