"""`schemathesis run` against the application: its answers are those that `/openapi.json` documents.

The suite makes a few cases for each operation, always the same. One soak makes thousands, enough
for each path that asks a model to answer one; the other as many at the schema's bounds as a time
allows.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import only_raystream
from tests.measured import Record
from tests.ray.serve_run import ROOT
from tests.serve_app.local_server import LocalServer

pytestmark = only_raystream("it asks models of all tasks for some answer, not for which")

CONFIG = Path(__file__).with_name("schemathesis.toml")
NUM_EXAMPLES = 14
"""The most for one operation; some have only one."""
MIN_NUM_CASES = 200
DEADLINE_S = 120
SOAK_NUM_EXAMPLES = 130
SOAK_MIN_NUM_CASES = 2000
SOAK_DEADLINE_S = 1800
COVERAGE_S = 120
"""There are far more cases at the bounds of two fields at once than a soak can send."""
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


@pytest.fixture
def url(local: LocalServer) -> Iterator[str]:
    with local.listening() as url:
        yield url


def run_schemathesis(url: str, folder: Path, deadline_s: float, *options: str) -> Any:
    """Return the report of a run without a failure; `options` are those of its command `run`."""
    report = folder / "report.json"
    run = subprocess.run(
        [
            Path(sys.executable).parent / "schemathesis",
            *("--config-file", CONFIG),
            *("run", f"{url}/openapi.json"),
            *("--checks", "all"),
            *("--report", "json", "--report-json-path", report),
            *options,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=deadline_s,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    return json.loads(report.read_text())


@pytest.mark.slow
def test_no_case_finds_a_5xx_or_an_undocumented_answer(
    url: str, tmp_path: Path, record: Record
) -> None:
    few = ("--phases", "fuzzing", "--max-examples", str(NUM_EXAMPLES))
    told = run_schemathesis(url, tmp_path, DEADLINE_S, *few)
    record("cases", told["test_cases"]["generated"])
    assert told["test_cases"]["generated"] >= MIN_NUM_CASES


@pytest.mark.soak
def test_no_case_of_thousands_finds_a_5xx_and_each_path_answers(
    url: str, tmp_path: Path, record: Record
) -> None:
    many = ("--phases", "examples,fuzzing", "--max-examples", str(SOAK_NUM_EXAMPLES))
    told = run_schemathesis(url, tmp_path, SOAK_DEADLINE_S, *many)
    record("cases", told["test_cases"]["generated"])
    assert told["test_cases"]["generated"] >= SOAK_MIN_NUM_CASES
    for path in ANSWERING:
        rates = told["valid_rates"][f"POST {path}"]
        assert sum(phase["accepted"] for phase in rates.values()) > 0, f"no answer of {path}"


@pytest.mark.soak
def test_no_case_at_the_bounds_of_the_schema_finds_a_5xx(
    url: str, tmp_path: Path, record: Record
) -> None:
    bounds = ("--phases", "coverage", "--max-time", str(COVERAGE_S))
    told = run_schemathesis(url, tmp_path, SOAK_DEADLINE_S, *bounds)
    record("cases", told["test_cases"]["generated"])
    assert told["test_cases"]["generated"]
