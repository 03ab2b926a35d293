"""A real Prometheus that scrapes servers under test, and Debian's checks of its rules.

Its command and `promtool` are in Debian's package `prometheus`. Tests that need them have the mark
`prometheus`.
"""

import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.free_port import free_port

DEADLINE_S = 60
SCRAPE_INTERVAL_S = 1


@dataclass(frozen=True)
class Sample:
    """A series and its value; the result of a calculation has no name."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> list[Sample]:
    """Return what Prometheus reads from a text in its format."""
    return [
        Sample(sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API."""
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        assert answer.status_code == 200, (parameters, answer.text)
        return answer.json()["data"]

    def query(self, expression: str) -> list[Sample]:
        """Return what an expression evaluates to now."""
        found = self.ask("query", query=expression)
        assert found["resultType"] == "vector", expression
        return [
            Sample(each["metric"].pop("__name__", ""), each["metric"], float(each["value"][1]))
            for each in found["result"]
        ]

    def until(self, expression: str, deadline_s: float = DEADLINE_S) -> list[Sample]:
        """Wait until an expression has a result; return it."""
        started = time.monotonic()
        while not (found := self.query(expression)):
            assert time.monotonic() - started < deadline_s, f"{expression} has no result"
            time.sleep(0.2)  # Prometheus's own loop scrapes; it tells nobody when it has
        return found


@contextmanager
def prometheus(
    folder: Path, targets: Mapping[str, str], rules: Sequence[Path]
) -> Iterator[Prometheus]:
    """Run a Prometheus until the block ends; `targets` are URLs by the name of their job."""
    config = {
        "global": {
            "scrape_interval": f"{SCRAPE_INTERVAL_S}s",
            "evaluation_interval": f"{SCRAPE_INTERVAL_S}s",
        },
        "rule_files": [str(path.resolve()) for path in rules],
        "scrape_configs": [
            {
                "job_name": name,
                "metrics_path": urlsplit(url).path,
                "static_configs": [{"targets": [urlsplit(url).netloc]}],
            }
            for name, url in targets.items()
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        _wait_until_ready(f"http://{address}", process, folder / "prometheus.log")
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    started = time.monotonic()
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() - started < DEADLINE_S, log.read_text()
        try:
            if httpx.get(f"{url}/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)


def check_rules(path: Path) -> str:
    """Return promtool's complaint about a file of rules; empty if it has none."""
    command = ["promtool", "check", "rules", "--lint-fatal", str(path)]
    checked = subprocess.run(command, capture_output=True, text=True)
    return "" if checked.returncode == 0 else checked.stdout + checked.stderr
