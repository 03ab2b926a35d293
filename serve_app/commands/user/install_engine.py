"""`raystream install-engine`: makes an environment that vLLM runs in, and shows that it starts.

pip installs vLLM, and Ray of our version, into a new virtual environment; our own packages are
links there (`serve_app.vllm_environment` says why). The lock's version of vLLM comes with all other
versions of the lock, another one with what pip finds. An environment that is there already is
brought to the version and the build; one of another Python is made again.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Final

import pynvml
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from serve_app.shipped_files import SHIPPED
from serve_app.vllm_environment import (
    BUILDS,
    CODE,
    OWN_VERSION,
    ROOT,
    VARIABLES,
    packages_of,
    python_of,
    versions_of,
)

LOCK: Final = SHIPPED / "requirements-vllm.lock"

BESIDE: Final = ("msgpack", "nvidia-ml-py")
"""What our replicas import, and neither vLLM nor Ray brings."""

NOT_ON_CPU: Final = ("torchvision", "torchaudio", "torchcodec")
"""Packages of vLLM for a CPU whose published builds need torch's CUDA build. transformers imports
them if they are there, and fails; without them it does without.
"""

PROOF: Final = """
import vllm
from vllm.v1.engine.async_llm import AsyncLLM
import ray.serve
import deployments.vllm_generator
import deployments.vllm_engine.engine
print(vllm.__version__)
"""
"""What a replica imports before it loads a model."""

ENGINE: Final = re.compile(r"vllm(?:==(?P<version>[0-9][0-9A-Za-z.+-]*))?")

Tell = Callable[[str], None]


class InstallError(Exception):
    """The environment can't be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be installed.

    Attributes:
        folder: The environment.
        version: vLLM's version.
        on_cpu: Whether it is the build for CPUs.
    """

    folder: Path
    version: str
    on_cpu: bool

    @property
    def packages(self) -> list[str]:
        """What pip is asked for."""
        build = BUILDS[self.on_cpu]
        return [f"{build}=={self.version}", f"ray[serve]=={version_of('ray')}", *BESIDE]

    @property
    def constraint(self) -> Path | None:
        """The file that has the versions of all other packages; None if pip chooses them."""
        return LOCK if self.version == locked_version() else None


def wanted(engine: str, folder: Path, on_cpu: bool | None) -> Wanted:
    """Return what a command line asks for.

    Args:
        engine: `vllm`, or `vllm==VERSION`.
        folder: The environment's folder.
        on_cpu: Whether the build for CPUs is installed; None if the machine has no GPU.

    Raises:
        InstallError: It is no such engine.
    """
    found = ENGINE.fullmatch(engine)
    if found is None:
        raise InstallError(f"{engine!r} is no engine: write vllm, or vllm==VERSION")
    version = found["version"] or locked_version()
    return Wanted(
        Path(os.path.abspath(folder)), version, not _has_gpu() if on_cpu is None else on_cpu
    )


def locked_version() -> str:
    """Return the version of vLLM in the lock, with which raystream is tested."""
    (found,) = re.findall(r"^vllm==(\S+)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def _has_gpu() -> bool:
    try:
        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return False


def install(asked: Wanted, console: Console) -> None:
    """Make the environment, or bring one to what is asked for, and show that vLLM starts in it.

    Raises:
        InstallError: A step fails; the message has the end of what it has written.
    """
    began_s = time.monotonic()
    build = f"{BUILDS[asked.on_cpu]} {asked.version}"
    console.print(f"{build} into {asked.folder}, some minutes the first time", soft_wrap=True)
    with _bar(console) as show:
        show("making the environment", None)
        _make(asked.folder)
        _install_packages(asked, show)
        link_code(asked.folder)
        show("starting vLLM", None)
        # Python finds modules in the working directory first: from ours, the links would not count.
        proof = [str(python_of(asked.folder)), "-c", PROOF]
        found = _run(proof, {**os.environ, **VARIABLES}, folder=asked.folder)
    took_s = time.monotonic() - began_s
    console.print(f"vLLM {found.strip().splitlines()[-1]} starts; all took {took_s:.0f} s")
    if asked.version != locked_version():
        console.print(f"raystream is tested with vLLM {locked_version()}")


Show = Callable[[str, float | None], None]
"""Shows a step, and the part of it that is done, 0 to 1; None if that is not known."""


@contextmanager
def _bar(console: Console) -> Iterator[Show]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        told: list[str] = []

        def show(step: str, done: float | None) -> None:
            progress.update(
                bar, description=step, total=None if done is None else 1, completed=done
            )
            kind = step.partition(":")[0]
            if not console.is_terminal and kind not in told:  # a log gets a line for each step
                told.append(kind)
                console.print(kind)

        yield show


def _make(folder: Path) -> None:
    """Make the environment unless there is one of this Python.

    Raises:
        InstallError: What is there is of another Python, and no environment that venv has made.
    """
    if any(version != OWN_VERSION for version in versions_of(folder)):
        if not (folder / "pyvenv.cfg").exists():
            raise InstallError(
                f"{folder} has packages of another Python, and is no virtual environment; name "
                "another folder"
            )
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
    elif not python_of(folder).exists():
        _run([sys.executable, "-m", "venv", str(folder)])


def _install_packages(asked: Wanted, show: Show) -> None:
    pip = [str(python_of(asked.folder)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    constraint = asked.constraint
    limits = [] if constraint is None else ["--constraint", str(constraint)]
    num_packages = len(LOCK.read_text(encoding="utf-8").splitlines())
    command = [*pip, "install", "--upgrade-strategy", "only-if-needed", *limits, *asked.packages]
    found = 0

    def follow(line: str) -> None:
        nonlocal found
        if line.startswith(("Collecting ", "Requirement already satisfied: ")):
            found += 1
            name = re.split(r"[ =<>!~;\[(]", line.split(": ")[-1].removeprefix("Collecting "))[0]
            show(f"finding packages: {name}", min(0.95, found / num_packages))
        elif line.startswith("Installing collected packages"):
            show("unpacking packages", None)

    show("finding packages", 0.0)
    if BUILDS[not asked.on_cpu] in packages_of(asked.folder):
        # Both builds write the same files. What is left of one would be mixed with the other.
        _run([*pip, "uninstall", "--yes", *BUILDS])
    _run(command, follow=follow)
    if asked.on_cpu:
        _run([*pip, "uninstall", "--yes", *NOT_ON_CPU])


def link_code(folder: Path) -> None:
    """Put links to our packages into an environment, in place of whatever has their names.

    Raises:
        InstallError: There is a package of that name that is no link.
    """
    for site in folder.glob("lib/python3.*/site-packages"):
        for name in CODE:
            link = site / name
            if link.is_symlink():
                link.unlink()
            elif link.exists():
                raise InstallError(f"{link} is no link; raystream was installed there: remove it")
            link.symlink_to(ROOT / name)


def _run(
    command: Sequence[str],
    environment: dict[str, str] | None = None,
    follow: Callable[[str], None] = lambda _: None,
    folder: Path | None = None,
) -> str:
    """Run a program and return what it writes.

    Raises:
        InstallError: It fails.
    """
    lines: list[str] = []
    with subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            follow(line.strip())
    if process.returncode != 0:
        raise InstallError(f"{' '.join(command[:4])} ... has failed:\n{''.join(_last(lines))}")
    return "".join(lines)


def _last(lines: Sequence[str]) -> Iterable[str]:
    return lines[-15:]
