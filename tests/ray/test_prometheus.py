"""A real Prometheus scrapes a server under load: every query of an operator has a result."""

import json
import re
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from ray import serve
from ray.dashboard.modules.metrics.dashboards.serve_dashboard_panels import serve_dashboard_config
from ray.dashboard.modules.metrics.dashboards.serve_deployment_dashboard_panels import (
    serve_deployment_dashboard_config,
)
from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import (
    serve_llm_dashboard_config,
)

from k8s.make_base import ALERTS
from k8s.make_dashboards import FOLDER
from serve_app.app import build
from serve_app.config import AppConfig
from tests.prometheus import DEADLINE_S, Prometheus, prometheus, samples
from tests.published_dashboards import LACKING_IN_RAY, VLLM
from tests.ray.serve_run import wait_until

pytestmark = [pytest.mark.prometheus, pytest.mark.slow]

NAME = "metrics"
CHAT, DETECTOR = "pydoc-chat", "pydoc-detector"
PLACE = {"device": "cpu", "num_gpus": 0, "num_cpus": 0.5, "max_model_len": 512}
RULES = ALERTS
VARIABLES = {
    "$__rate_interval": "10s",
    "$interval": "30s",
    "$model_name": ".*",
    "$vllm_model_name": ".*",
    "$workerid": ".*",
    "$deployment": ".*",
    "$Application": ".*",
    "$HTTP_Route": ".*",
    "$gRPC_Method": ".*",
    "$Route": ".*",
    "[24h:1m]": "[1m:1s]",  # its steps are those of the clock, so the first would be awaited
}


@pytest.fixture(scope="module")
def server(base_url: str) -> Iterator[httpx.Client]:
    """Serve the embedded models, as shipped, under a prefix of their own."""
    config = AppConfig.model_validate(
        {
            "models": [
                {"id": CHAT, "source": f"models/{CHAT}", **PLACE},
                {"id": DETECTOR, "source": f"models/{DETECTOR}", "task": "classify", **PLACE},
            ],
            "auth": {"allow_unauthenticated_ray": True},
        }
    )
    serve.run(build(config), name=NAME, route_prefix=f"/{NAME}")
    with httpx.Client(base_url=f"{base_url}/{NAME}", timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def scraping(
    server: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    port = ray.nodes()[0]["MetricsExportPort"]  # type: ignore[no-untyped-call] # Ray leaves it untyped
    targets = {
        "raystream": str(server.base_url.join("metrics")),
        "ray": f"http://127.0.0.1:{port}/metrics",
    }
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets, [RULES]) as running:
        yield running


def ask(server: httpx.Client, seed: int) -> int:
    """Ask both models; return the tokens of the text model's answer."""
    question = [{"role": "user", "content": "What does os.path.join do?"}]
    body = {"model": CHAT, "messages": question, "max_tokens": 40, "seed": seed}
    answer = server.post("v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    text = answer.json()["choices"][0]["message"]["content"]
    classified = server.post("v1/classify", json={"model": DETECTOR, "input": text or "?"})
    assert classified.status_code == 200, classified.text
    num_tokens: int = answer.json()["usage"]["completion_tokens"]
    return num_tokens


class Loaded:
    """A Prometheus, and the load on the server that it scrapes."""

    def __init__(self, server: httpx.Client, scraping: Prometheus) -> None:
        self._server = server
        self._seeds = count()
        self.prometheus = scraping
        self.num_tokens = 0  # the tokens of all answers of the text model

    def ask(self) -> None:
        """Ask both models."""
        self.num_tokens += ask(self._server, next(self._seeds))

    def empty_under_load(self, expressions: Iterable[str]) -> list[str]:
        """Ask the server until all expressions have a result; return those that get none."""
        deadline_s = time.monotonic() + DEADLINE_S
        empty = list(expressions)
        while empty := [each for each in empty if not self.prometheus.query(filled_in(each))]:
            if time.monotonic() > deadline_s:
                break
            self.ask()
        return empty


@pytest.fixture(scope="module")
def loaded(server: httpx.Client, scraping: Prometheus) -> Loaded:
    """Load the server until Prometheus has seen that, in our own names and in Ray's."""
    loaded = Loaded(server, scraping)
    seen = (
        f'rate(vllm:e2e_request_latency_seconds_count{{model_name="{CHAT}"}}[10s]) > 0',
        f'rate(ray_vllm_request_success_total{{model_name="{CHAT}"}}[30s]) > 0',
        f'rate(ray_vllm_inter_token_latency_seconds_sum{{model_name="{CHAT}"}}[30s]) > 0',
        f'rate(ray_vllm_prefix_cache_hits_total{{model_name="{CHAT}"}}[30s]) > 0',
        f'rate(ray_serve_deployment_request_counter_total{{deployment="{CHAT}"}}[30s]) > 0',
    )
    assert loaded.empty_under_load(seen) == []
    return loaded


def filled_in(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:vllm:|raystream_|ray_)\w+", expression))


def test_vllm_s_dashboard_finds_each_metric_and_label(loaded: Loaded) -> None:
    found = {name: loaded.prometheus.query(f'{name}{{model_name="{CHAT}"}}') for name in VLLM}
    lacking = {
        name: [labels - sample.labels.keys() for sample in found[name]] or "no series"
        for name, labels in VLLM.items()
        if not found[name] or not all(labels <= sample.labels.keys() for sample in found[name])
    }
    assert lacking == {}


def test_keda_s_queries_have_one_value(loaded: Loaded) -> None:
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert len(loaded.prometheus.query(f'sum(vllm:{name}{{model_name="{CHAT}"}})')) == 1


def ray_targets() -> list[str]:
    """Return the queries of the installed Ray's dashboard for LLMs."""
    rows = serve_llm_dashboard_config.rows or ()
    expressions = {target.expr for row in rows for panel in row.panels for target in panel.targets}
    return sorted(each.format(global_filters='SessionName=~".*"') for each in expressions)


def test_ray_s_own_dashboard_has_curves_in_each_panel_but_those_that_the_page_names(
    loaded: Loaded,
) -> None:
    targets = ray_targets()
    lacking = [
        each for each in targets if any(name.startswith(LACKING_IN_RAY) for name in names_in(each))
    ]
    assert len(targets) > len(lacking) > 0
    assert loaded.empty_under_load(each for each in targets if each not in lacking) == []
    # docs/metrics.md says that they are lacking.
    assert [each for each in lacking if loaded.prometheus.query(filled_in(each))] == []


def serve_tab_graphs() -> dict[str, list[str]]:
    """Return the queries of each graph in the Serve tab of the installed Ray's dashboard."""
    boards = (serve_dashboard_config, serve_deployment_dashboard_config)
    panels = {panel.title: panel.targets for board in boards for panel in board.panels}
    (page,) = (Path(ray.dashboard.__file__).parent / "client/build/static/js").glob("main.*.js")
    titles = re.findall(r'title:"([^"]+)",pathParams:"panelId=\d+"', page.read_text("utf-8"))
    return {
        title: [target.expr.format(global_filters='SessionName=~".*"') for target in panels[title]]
        for title in titles
    }


LACKING_IN_SERVE_TAB = {"Ongoing gRPC Requests"}
"""Graphs that stay empty: raystream speaks HTTP."""

PASSING_IN_SERVE_TAB = {
    "Error QPS per replica",  # a replica raises only for faults of the server, not of clients
    "Scheduling Tasks in Backoff",  # told once that it is 0, then while it is not
}
"""Graphs that may be empty, and may not be: other applications of the cluster fill them, too."""


def test_each_graph_of_ray_s_serve_tab_has_a_curve_but_those_named_above(
    server: httpx.Client, loaded: Loaded
) -> None:
    graphs = serve_tab_graphs()
    assert graphs.keys() > LACKING_IN_SERVE_TAB | PASSING_IN_SERVE_TAB
    assert server.post("v1/chat/completions", json={"model": "missing"}).status_code >= 400
    curves = {
        " or ".join(f"({each})" for each in expressions): title
        for title, expressions in graphs.items()
        if title not in LACKING_IN_SERVE_TAB | PASSING_IN_SERVE_TAB
    }
    assert [curves[each] for each in loaded.empty_under_load(curves)] == []
    for title in LACKING_IN_SERVE_TAB:
        assert not any(loaded.prometheus.query(filled_in(each)) for each in graphs[title])
    for title in PASSING_IN_SERVE_TAB:  # Prometheus takes the queries
        for each in graphs[title]:
            loaded.prometheus.query(filled_in(each))


def our_expressions() -> list[str]:
    board = json.loads((FOLDER / "raystream.json").read_text(encoding="utf-8"))
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


def test_our_dashboard_has_curves_in_each_panel(loaded: Loaded) -> None:
    # No stream is parked here, so nothing is told of the time for which one was.
    expressions = [each for each in our_expressions() if "parked_seconds" not in each]
    assert expressions
    assert loaded.empty_under_load(expressions) == []


def test_the_rules_run_and_none_fires_on_a_healthy_server(loaded: Loaded) -> None:
    assert loaded.empty_under_load(["raystream:late_first_tokens:ratio_rate5m"]) == []
    groups = loaded.prometheus.ask("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    document = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    assert len(rules) == sum(len(group["rules"]) for group in document["groups"])
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert [rule["name"] for rule in rules if rule.get("state") == "firing"] == []


def test_each_alert_has_a_condition_that_can_be_met(loaded: Loaded) -> None:
    """Turn each comparison round: what does not hold on a healthy server then does."""
    turned = []
    for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]:
        for rule in group["rules"]:
            if "alert" in rule and not rule["expr"].startswith("absent"):
                turned.append(re.sub(r" > (?!time)([^a-z]+)", r" <= \1", rule["expr"]))
                assert turned[-1] != rule["expr"]
    assert turned
    assert loaded.empty_under_load(turned) == []


def test_delivered_tokens_are_those_that_clients_read(server: httpx.Client, loaded: Loaded) -> None:
    name = "raystream_delivered_tokens_total"

    def delivered() -> float:
        found = samples(server.get("metrics").text)
        mine = (each for each in found if each.name == name and each.labels["model_name"] == CHAT)
        return sum(each.value for each in mine)

    for _ in range(3):
        loaded.ask()
    wait_until(lambda: delivered() >= loaded.num_tokens, DEADLINE_S)  # it is up to a second old
    assert delivered() == loaded.num_tokens
    query = f'sum({name}{{model_name="{CHAT}"}})'
    (found,) = loaded.prometheus.until(f"{query} >= {loaded.num_tokens}")
    assert found.value == loaded.num_tokens
