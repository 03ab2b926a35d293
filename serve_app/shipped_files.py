"""The files that raystream brings: serve_config.yaml, serve.env, vLLM's lock and `models`.

A checkout has them in its root. A wheel has them in the folder `shipped` of this package, where
`hatch_build.py` puts them.
"""

from pathlib import Path
from typing import Final


def _folder() -> Path:
    package = Path(__file__).resolve().parent
    in_wheel = package / "shipped"
    return in_wheel if in_wheel.is_dir() else package.parent


SHIPPED: Final = _folder()
"""Relative paths of a configuration are looked up in the working directory first, then here."""

CONFIG: Final = SHIPPED / "serve_config.yaml"
"""What `raystream serve` serves if it finds no file."""


def serve_variables() -> dict[str, str]:
    """Return the variables of serve.env: how Serve runs under raystream."""
    return parse_env((SHIPPED / "serve.env").read_text(encoding="utf-8"))


def parse_env(text: str) -> dict[str, str]:
    """Read KEY=VALUE lines, ignoring blank lines and comments.

    Raises:
        ValueError: A line has quotes, which some readers drop and others keep.
    """
    stripped = map(str.strip, text.splitlines())
    lines = [line for line in stripped if line and not line.startswith("#")]
    for line in lines:
        if "'" in line or '"' in line:
            raise ValueError(f"write values without quotes: {line}")
    return dict(line.split("=", maxsplit=1) for line in lines)
