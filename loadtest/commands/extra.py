"""Refuses a command before it does anything if packages of the extra `bench` are missing.

Serving needs none of them, so an environment that only serves has none.
"""

from importlib.util import find_spec

from loadtest.commands.usage import refuse


def need_extra(*, png: bool, text_path: bool = False) -> None:
    """End a command that writes a report if a package is missing; say how to install it.

    Args:
        png: Whether it also draws plots.
        text_path: Whether it also reads texts by a JMESPath.
    """
    needs = (
        ("plotly", "report.html", True),
        ("matplotlib", "--png", png),
        ("jmespath", "--text-path", text_path),
    )
    missing = [(name, what) for name, what, is_asked in needs if is_asked and not _has(name)]
    if missing:
        refuse(*(f"{what} needs {name}: pip install 'raystream[bench]'" for name, what in missing))


def _has(name: str) -> bool:
    return find_spec(name) is not None
