"""What programs import from `raystream`."""

import subprocess
import sys
from pathlib import Path

import raystream

PACKAGES = ("deployments", "loadtest", "raystream", "serve_app")


def test_each_name_is_found_and_named_as_it_is_called() -> None:
    found = {name: getattr(raystream, name) for name in raystream._HOMES}
    assert [name for name, each in found.items() if each.__name__ != name] == []
    assert set(found) <= set(dir(raystream))
    assert not hasattr(raystream, "Modell")


def test_the_import_brings_nothing_heavy() -> None:
    code = "import raystream, sys; print({'ray', 'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_the_packages_say_that_they_are_typed() -> None:
    folder = Path(raystream.__file__).parents[1]
    assert [name for name in PACKAGES if not (folder / name / "py.typed").exists()] == []
