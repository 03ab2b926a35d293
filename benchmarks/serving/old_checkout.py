"""Extracts an older commit, which benchmarks measure beside this checkout."""

import io
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

BASELINE = "77fac12"
"""The oldest commit that runs with today's packages."""

ROOT = Path(__file__).resolve().parent.parent.parent


@contextmanager
def old_checkout(commit: str, *paths: str) -> Iterator[Path]:
    """Extract these files and folders of a commit into a temporary folder."""
    archive = subprocess.run(
        ["git", "archive", commit, *paths], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    with TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)
