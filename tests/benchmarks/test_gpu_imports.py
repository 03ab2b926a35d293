"""Tests what `benchmarks.gpu` imports, in an interpreter that lacks the other packages."""

import subprocess
import sys

import pytest

LACKING = (
    *("fastapi", "llguidance", "llvmlite", "psutil", "pydantic", "ray", "starlette"),
    *("uvicorn", "uvloop"),
)
"""Packages that the project installs and a machine with torch and transformers may lack."""

PROGRAM = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(name)

# transformers imports what it finds installed, so it is imported before the block.
from transformers import Qwen2ForCausalLM

sys.meta_path.insert(0, Lacking())
import benchmarks.gpu.__main__

print("imported")
"""


@pytest.mark.slow
def test_it_needs_only_torch_and_transformers() -> None:
    program = PROGRAM.format(lacking=LACKING)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
