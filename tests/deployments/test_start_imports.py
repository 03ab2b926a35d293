"""Holds what the modules of a replica import: each start of a model that slept waits for them."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

LOADING = ("deployments.text_generator", "deployments.text_pooler")
"""The modules of the replicas that load a model themselves."""

HEAVY = (
    *("IPython", "matplotlib", "pandas", "sklearn", "sentence_transformers", "numba", "networkx"),
    *("accelerate", "datasets", "peft", "tensorflow", "torchvision", "torchaudio"),
    *("openai", "llguidance", "llvmlite", "triton", "vllm"),
    *("ray.data", "ray.train", "ray.tune", "ray.llm", "serve_app", "loadtest", "rich"),
    *("aiohttp", "torch.export._trace", "torch._inductor.compile_fx"),
)
"""Modules that take long to import, and that a replica needs late or never.

llvmlite, llguidance and Triton are imported by what uses them.
"""

COMPILERS = (
    "torch._dynamo.utils",
    "torch._inductor",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
)
"""Parts of what transformers imports to decorate functions, and to compare types."""

PROGRAM = """
import gc, sys

from deployments.replica import own_actor

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers", "ray.serve"):
            print(name, gc.isenabled())

own_actor.is_actor = lambda: True
sys.meta_path.insert(0, Watch())
import {module}
print("then", gc.isenabled())
print("heavy", *(name for name in {heavy!r} if name in sys.modules))
"""
"""Says whether the collector works at each large import and after all, and which are heavy."""

STARTING = """
import sys

from benchmarks.starts import MODEL, start

start(MODEL, as_actor=True)
print(*(name for name in {unused!r} if name in sys.modules))
"""

TRACING = """
import sys

import torch

from deployments.compute.traced_model.graph_tracer import trace_graph

trace_graph(lambda rows: rows * rows.shape[0], (torch.zeros(7, 3),))
print(*(name for name in {unused!r} if name in sys.modules))
"""

UNUSED = ("networkx", "torch.export._trace", "torch._functorch.aot_autograd")
"""Modules that `make_fx` would import to tell lines of torch from a model's."""


@cache
def printed(module: str) -> set[str]:
    """Import a module in a process of its own, once for all tests, and return what that printed."""
    return set(run(PROGRAM.format(module=module, heavy=HEAVY)).splitlines())


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("module", [*LOADING, "deployments.vllm_generator"])
def test_a_replica_starts_without_heavy_modules(module: str) -> None:
    assert {line for line in printed(module) if line.startswith("heavy")} == {"heavy"}


@pytest.mark.slow
@pytest.mark.parametrize("module", LOADING)
def test_the_collector_rests_while_an_actor_imports_what_is_large(module: str) -> None:
    expected = {"ray.serve False", "torch False", "transformers False", "then True"}
    assert printed(module) - {"heavy"} == expected


@pytest.mark.slow
def test_a_trace_imports_no_compilers() -> None:
    assert run(TRACING.format(unused=UNUSED)).split() == []


@pytest.mark.slow
def test_a_start_with_its_trace_on_disk_imports_no_compilers(tmp_path: Path) -> None:
    program = STARTING.format(unused=COMPILERS)
    run(program, XDG_CACHE_HOME=str(tmp_path))  # makes the trace
    assert run(program, XDG_CACHE_HOME=str(tmp_path)).split() == []
