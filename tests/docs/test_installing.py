"""docs/installing.md says which versions `pyproject.toml` allows."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEXT = (ROOT / "docs" / "installing.md").read_text(encoding="utf-8")
SUPPORTED = dict(
    re.findall(r"^\| ([\w, ]+) \| ([\d., and]+|[\d.]+ to [\d.]+) \|", TEXT, re.MULTILINE)
)
ALLOWED = {
    requirement.name: requirement.specifier
    for requirement in map(Requirement, PROJECT["dependencies"])
}


def test_the_versions_of_python_are_those_that_pip_accepts() -> None:
    first, last = (int(minor) for minor in re.findall(r"3\.(\d+)", SUPPORTED["Python"]))
    allowed = SpecifierSet(PROJECT["requires-python"])
    accepted = [minor for minor in range(last + 5) if f"3.{minor}" in allowed]
    assert accepted == list(range(first, last + 1))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"Python 3.{first} to 3.{last}" in readme


@pytest.mark.parametrize("names", ["Ray", "torch", "transformers", "llvmlite"])
def test_the_versions_of_packages_are_those_that_pip_accepts(names: str) -> None:
    pairs = zip(names.split(", "), SUPPORTED[names].split(", "), strict=True)
    for name, version in pairs:
        later = re.sub(r"\d+$", lambda last: str(int(last[0]) + 1), version)
        assert version in ALLOWED[name.lower()], name
        assert later not in ALLOWED[name.lower()], name
