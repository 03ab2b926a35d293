"""Leaves out the tests that import vLLM, unless the pytest of vLLM's environment runs them.

That environment lacks what the other tests need, those of whole servers (`served/`) too, so pytest
must not read their conftest.py: `--confcutdir=tests/vllm_engine`.
"""

import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

from serve_app.vllm_environment import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm_engine.in_process import InProcessEngine

HAS_VLLM = find_spec("vllm") is not None
IMPORTING = [
    f"test_{name}.py"
    for name in ("allowed_args", "draws", "engine", "grammars", "lora", "scheduler")
]
collect_ignore = ["served"] if HAS_VLLM else IMPORTING

if HAS_VLLM:
    # Read when vLLM is imported. The model runs in this process, so that tests reach its logits.
    os.environ |= {
        **VARIABLES,
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="session")
def engine() -> "Iterator[InProcessEngine]":
    """Return vLLM with a tiny model, in this process; a start takes 5 seconds of CPU time."""
    from tests.vllm_engine.in_process import InProcessEngine

    started = InProcessEngine()
    yield started
    started.stop()
