"""`schemathesis run` against the server: its answers are those that `/openapi.json` documents."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.measured import Record
from tests.ray.serve_run import ROOT, Server

CONFIG = Path(__file__).with_name("schemathesis.toml")
START_S = 80
"""What schemathesis may take besides its time for cases."""

ANSWERING = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/text-generation",
    "/v1/classify",
    "/classify",
    "/v1/embeddings",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/score",
    "/v1/score",
)
"""The paths that must give at least one answer."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_cases", "num_of_each", "max_time_s"),
    [(1000, 50, 120), pytest.param(2000, 100, 360, marks=pytest.mark.soak)],
)
def test_no_case_finds_a_5xx_or_an_undocumented_answer(
    server: Server,
    tmp_path: Path,
    record: Record,
    num_cases: int,
    num_of_each: int,
    max_time_s: int,
) -> None:
    report = tmp_path / "report.json"
    run = subprocess.run(
        [
            Path(sys.executable).parent / "schemathesis",
            *("--config-file", CONFIG),
            *("run", f"{server.url}/openapi.json"),
            *("--checks", "all"),
            *("--max-examples", str(num_of_each)),
            *("--max-time", str(max_time_s)),
            *("--report", "json", "--report-json-path", report),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=max_time_s + START_S,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    told = json.loads(report.read_text())
    record("cases", told["test_cases"])
    assert told["test_cases"]["generated"] >= num_cases
    for path in ANSWERING:
        rates = told["valid_rates"][f"POST {path}"]
        assert sum(phase["accepted"] for phase in rates.values()) > 0, f"no answer of {path}"
