"""The one command, and what programs import: `Model`, `Engine`, `build_app` and their types.

The command is the server's command line and the load tester's, which share no code. The names are
imported when they are first used: `Engine` brings torch, and the command must start at once.

Its packages must be those that were installed with it. `python -m raystream` finds them whatever
lies in the working directory. A package of the same name that Python finds earlier by other ways,
such as PYTHONPATH, is named here: the first import from it would fail with a riddle.
"""

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployments.contract.errors import InvalidRequestError as InvalidRequestError
    from deployments.contract.errors import OverloadedError as OverloadedError
    from deployments.contract.errors import RaystreamError as RaystreamError
    from deployments.contract.model_spec import ModelConfig as ModelConfig
    from raystream.applications import connect as connect
    from raystream.engine import Engine as Engine
    from raystream.model import Delta as Delta
    from raystream.model import Model as Model
    from serve_app.app import build as build
    from serve_app.app import build_app as build_app
    from serve_app.config import AppConfig as AppConfig

PACKAGES = ("serve_app", "deployments", "loadtest")


def _import_from_here_last() -> None:
    """Put the working directory, which `python -m` puts first, behind what is installed."""
    # Python says "-m" until it has found the module to run.
    if sys.argv[:1] == ["-m"] and sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]):
        sys.path.append(sys.path.pop(0))


def require_own_packages() -> None:
    """Check that each of our packages is the one that was installed with this one.

    Raises:
        ImportError: Another one hides it.
    """
    for name in PACKAGES:
        found = find_spec(name)
        origin = None if found is None else found.origin
        if origin is not None and Path(origin).parents[1] != Path(__file__).parents[1]:
            raise ImportError(
                f"{origin} hides raystream's own package {name!r}: rename it, or take its "
                "folder out of PYTHONPATH, or start from another folder"
            )


_import_from_here_last()


_HOMES = MappingProxyType(
    {
        "AppConfig": "serve_app.config",
        "Delta": "raystream.model",
        "Engine": "raystream.engine",
        "InvalidRequestError": "deployments.contract.errors",
        "Model": "raystream.model",
        "ModelConfig": "deployments.contract.model_spec",
        "OverloadedError": "deployments.contract.errors",
        "RaystreamError": "deployments.contract.errors",
        "build": "serve_app.app",
        "build_app": "serve_app.app",
        "connect": "raystream.applications",
    }
)
"""The names that programs import from here, each with the module that it lies in."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_own_packages()
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
