"""What the wheel holds; `tests/ray/test_wheel.py` serves from it."""

import zipfile
from pathlib import Path

import pytest

from serve_app.shipped_files import CONFIG, SHIPPED
from tests.built_wheel import ROOT, build_wheel

PACKAGES = ("deployments", "loadtest", "raystream", "serve_app")
MODELS = ("pydoc-chat", "pydoc-detector", "pydoc-search")
MAX_BYTES = 30 * 2**20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def files_below(folder: Path) -> set[str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(each.relative_to(ROOT)) for each in files if "__pycache__" not in each.parts}


def test_it_puts_only_our_packages_into_an_environment(names: set[str]) -> None:
    tops = {name.split("/")[0] for name in names}
    (metadata,) = (top for top in tops if top.endswith(".dist-info"))
    assert tops == {*PACKAGES, metadata}


def test_it_holds_every_file_of_the_packages(names: set[str]) -> None:
    for package in PACKAGES:
        assert files_below(ROOT / package) <= names


def test_it_holds_the_configuration_switches_locks_and_models_but_no_training(
    names: set[str],
) -> None:
    expected = {"serve_config.yaml", "serve.env", "requirements-vllm.lock"}
    expected |= {name for model in MODELS for name in files_below(ROOT / "models" / model)}
    start = "serve_app/shipped/"
    assert {name.removeprefix(start) for name in names if name.startswith(start)} == expected


def test_it_is_no_larger_than_the_models_need(wheel: Path) -> None:
    assert wheel.stat().st_size < MAX_BYTES


def test_in_a_checkout_the_files_are_those_of_its_root() -> None:
    assert (SHIPPED, CONFIG) == (ROOT, ROOT / "serve_config.yaml")
    assert not (ROOT / "serve_app" / "shipped").exists()
