"""The one command: the server's command line and the load tester's, which share no code.

Its packages must be those that were installed with it. `python -m raystream` finds them whatever
lies in the working directory. A package of the same name that Python finds earlier by other ways,
such as PYTHONPATH, is refused here, in one line: the first import from it would fail with a
traceback.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("serve_app", "deployments", "loadtest")


def _import_from_here_last() -> None:
    """Put the working directory, which `python -m` puts first, behind what is installed."""
    # Python says "-m" until it has found the module to run.
    if sys.argv[:1] == ["-m"] and sys.path[0] == os.getcwd() != str(Path(__file__).parents[1]):
        sys.path.append(sys.path.pop(0))


def _refuse_others() -> None:
    for name in PACKAGES:
        found = find_spec(name)
        origin = None if found is None else found.origin
        if origin is not None and Path(origin).parents[1] != Path(__file__).parents[1]:
            sys.exit(
                f"Error: {origin} hides raystream's own package {name!r}: rename it, or take its "
                "folder out of PYTHONPATH, or start from another folder"
            )


_import_from_here_last()
_refuse_others()
