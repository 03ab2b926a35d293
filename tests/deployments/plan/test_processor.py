"""What the processor lacks is not used, and neither is what ATEN_CPU_CAPABILITY takes away."""

import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

from deployments.plan.processor import CAPABILITY, target_features, usable
from tests.ray.serve_run import ROOT

FOUND = {"sse2": True, "avx": True, "avx2": True, "fma": True, "avx512f": True, "avx512bf16": True}
FOUND |= {"amx-bf16": False, "bmi2": True}

ONEDNN = {"avx2": "AVX2", "default": "SSE41"}
"""What takes the same instructions from oneDNN."""

FOLDERS = (
    *("tests/compute", "tests/engine", "tests/engine/attention", "tests/engine/model"),
    *("tests/engine/replay", "tests/pooling"),
)
"""What runs with fewer instructions, in parts of some minutes."""

ADDITION = """
define <8 x float> @add(<8 x float> %a, <8 x float> %b) {
  %sum = fadd <8 x float> %a, %b
  ret <8 x float> %sum
}
"""


@pytest.mark.parametrize(
    ("capability", "left"),
    [
        ("", {"sse2", "avx", "avx2", "fma", "avx512f", "avx512bf16", "bmi2"}),
        ("avx512", {"sse2", "avx", "avx2", "fma", "avx512f", "avx512bf16", "bmi2"}),
        ("avx2", {"sse2", "avx", "avx2", "fma", "bmi2"}),
        ("default", {"sse2", "bmi2"}),
    ],
)
def test_a_capability_takes_features_away(capability: str, left: set[str]) -> None:
    found = usable(FOUND, capability)
    assert found.keys() == FOUND.keys()
    assert {name for name, has in found.items() if has} == left


@pytest.mark.parametrize(("capability", "has_wide"), [("avx2", True), ("default", False)])
def test_what_is_taken_away_is_not_in_the_code(capability: str, has_wide: bool) -> None:
    """Compiled for a processor that has it, and features that need what is taken away."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    found = {**FOUND, "vaes": True, "vpclmulqdq": True}
    machine = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(
        cpu="znver4", features=target_features(usable(found, capability))
    )
    assembly = machine.emit_assembly(llvm.parse_assembly(ADDITION))
    assert ("ymm" in assembly) is has_wide


def environment(capability: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        CAPABILITY: capability,
        "ONEDNN_MAX_CPU_ISA": ONEDNN[capability],
    }


@pytest.mark.slow
def test_an_old_processor_is_told_what_it_lacks() -> None:
    command = [sys.executable, "-m", "serve_app", "info"]
    told = subprocess.run(
        command, env=environment("default"), check=True, capture_output=True, text=True
    ).stdout
    lines = dict(line.strip().split("  ", 1) for line in told.splitlines())
    assert lines["attention"].strip().startswith("vectors of 4 float32")
    assert lines["float32 layers"].strip() == "oneDNN's kernels; decode steps run call by call"
    assert lines["bfloat16"].strip() == "slow; dtype auto takes float32 instead"


@pytest.mark.soak
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("capability", ONEDNN)
def test_the_engine_runs_on_lesser_processors(capability: str, folder: str) -> None:
    """The tests of kernels, engine and pooling pass with fewer instructions than this machine's."""
    others = [f"--ignore={other}" for other in FOLDERS if other.startswith(f"{folder}/")]
    command = (sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider")
    run = subprocess.run(
        [*command, folder, *others],
        cwd=ROOT,
        # Idle threads sleep at once, since the workers have more threads than there are cores.
        env={**environment(capability), "GOMP_SPINCOUNT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:]
