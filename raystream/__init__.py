"""The one command: the server's command line and the load tester's, which share no code.

Its packages must be those that were installed with it. A folder of the same name that Python finds
earlier, in PYTHONPATH or with `python -m` in the working directory, is refused here, in one line:
the first import from it would fail with a traceback.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("serve_app", "deployments", "loadtest")


def _refuse_others() -> None:
    for name in PACKAGES:
        found = find_spec(name)
        origin = None if found is None else found.origin
        if origin is not None and Path(origin).parents[1] != Path(__file__).parents[1]:
            sys.exit(
                f"Error: {origin} hides raystream's own package {name!r}: rename it, or take its "
                "folder out of PYTHONPATH, or start from another folder"
            )


_refuse_others()
