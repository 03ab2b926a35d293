"""Node, as the tests of the page run it."""

import sys
from pathlib import Path
from typing import Final

NODE: Final = str(Path(sys.executable).parent / "node")
PACKAGES: Final = Path(__file__).parent / "node"
"""The packages from npm that these tests need."""

MODULES: Final = Path(__file__).parent / "modules"
"""Tests and programs that import the page's modules."""
