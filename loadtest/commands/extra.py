"""Refuses a command before it does anything if packages of the extra `bench` are missing.

Serving needs none of them, so an environment that only serves has none.
"""

from collections.abc import Mapping
from importlib.util import find_spec

from loadtest.commands.usage import refuse


def need(packages: Mapping[str, str]) -> None:
    """End the command if a package is missing, with a line that says how to install it.

    Args:
        packages: By package, what needs it.
    """
    missing = {name: what for name, what in packages.items() if find_spec(name) is None}
    if missing:
        refuse(
            *(
                f"{what} needs {name}: pip install 'raystream[bench]'"
                for name, what in missing.items()
            )
        )


def need_for_report(*, png: bool) -> None:
    """End the command if a run's report can't be written.

    Args:
        png: Whether plots are drawn too.
    """
    need({"plotly": "report.html"} | ({"matplotlib": "--png"} if png else {}))
