"""`raystream info`: what this machine and this environment have."""

import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from deployments.compute.speedups import describe_kernels
from deployments.device.device import CpuDevice, num_cores
from deployments.plan.memory_budget import GIB
from serve_app.vllm_environment import DEFAULT_FOLDER, vllm_version

PACKAGES: Final = ("raystream", "ray", "torch", "transformers", "starlette", "pydantic")


def describe_machine() -> str:
    """Return a line for each fact."""
    return "".join(f"{name:<20}{value}\n" for name, value in _facts())


def _facts() -> Iterator[tuple[str, str]]:
    yield "python", f"{platform.python_version()} at {sys.executable}"
    for package in PACKAGES:
        yield package, _version(package)
    yield "vllm", vllm_version(DEFAULT_FOLDER) or f"not installed at {DEFAULT_FOLDER}"
    yield "system", platform.platform()
    yield "cpu", f"{num_cores()} core(s), {torch.backends.cpu.get_cpu_capability()}"
    yield from ((f"  {name}", how) for name, how in describe_kernels())
    yield "memory", f"{CpuDevice().total_bytes / GIB:.1f} GiB free"
    if not torch.cuda.is_available():
        built = "CUDA " + torch.version.cuda if torch.version.cuda else "no GPU"
        yield "gpu", f"none seen; this torch is built for {built}"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield f"gpu {index}", f"{gpu.name}, {gpu.total_memory / GIB:.1f} GiB"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
