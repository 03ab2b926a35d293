"""What `benchmarks.gpu` needs of a machine, shown in an interpreter that lacks all else."""

import subprocess
import sys

LACKING = (
    *("fastapi", "llguidance", "llvmlite", "numba", "psutil", "pydantic", "ray", "starlette"),
    *("uvicorn", "uvloop"),
)
"""What the project installs and a machine with torch and transformers may lack."""

PROGRAM = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {lacking!r}:
            raise ModuleNotFoundError(name)

# transformers takes what it finds installed; that is its own business.
from transformers import Qwen2ForCausalLM

sys.meta_path.insert(0, Lacking())
import benchmarks.gpu.__main__

print("imported")
"""


def test_torch_and_transformers_are_all_it_imports() -> None:
    program = PROGRAM.format(lacking=LACKING)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
