"""A plugin of pytest: vLLM's Python runs tests that are written for both engines.

What these tests need and vLLM's environment lacks, such as a client's SDK, comes from raystream's
own environment, whose packages are looked for last. Only tests do that.
"""

import os
import sys
from pathlib import Path

import pytest

from serve_app.vllm_environment import VARIABLES

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Prepare what is read when vLLM and the tests are imported."""
    os.environ |= {**VARIABLES, "OMP_NUM_THREADS": "1"}
    sys.path.append(str(Path(__file__).parents[2] / ".venv/lib" / PYTHON / "site-packages"))
