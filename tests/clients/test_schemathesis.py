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
MIN_NUM_CASES = 2000
DEADLINE_S = 200
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
def test_no_case_finds_a_5xx_or_an_undocumented_answer(
    server: Server, tmp_path: Path, record: Record
) -> None:
    report = tmp_path / "report.json"
    run = subprocess.run(
        [
            Path(sys.executable).parent / "schemathesis",
            *("--config-file", CONFIG),
            *("run", f"{server.url}/openapi.json"),
            *("--checks", "all"),
            *("--report", "json", "--report-json-path", report),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    told = json.loads(report.read_text())
    record("cases", told["test_cases"]["generated"])
    assert told["test_cases"]["generated"] >= MIN_NUM_CASES
    for path in ANSWERING:
        rates = told["valid_rates"][f"POST {path}"]
        assert sum(phase["accepted"] for phase in rates.values()) > 0, f"no answer of {path}"
