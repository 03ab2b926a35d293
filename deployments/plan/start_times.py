"""How long models last took to start and to wake on this machine: `raystream plan` tells of swaps.

A replica that has started, or has woken from a light sleep, leaves the time in a small file, one
for each model. The files are only for people who plan: one that can't be written or read is passed
over.
"""

import json
import logging
import os
from contextlib import suppress
from hashlib import sha256
from math import isfinite
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from deployments.contract.model_spec import ModelSpec
from deployments.plan.cache_folder import cache_folder

logger = logging.getLogger(__name__)

STARTS: Final = "starts"
WAKES: Final = "wakes"
"""The folders in the cache folder."""

MAX_MODELS: Final = 64
"""How many models' times of each kind are kept; the oldest go first."""

MAX_BYTES: Final = 4096
"""A file that is longer is none of these."""


def note_start(spec: ModelSpec, total_s: float) -> None:
    """Keep how long a model took to start, in place of what it took before.

    Args:
        spec: The model.
        total_s: Seconds from the beginning of its process, or of the imports, until it was ready.
    """
    _keep(spec, STARTS, total_s)


def note_wake(spec: ModelSpec, total_s: float) -> None:
    """Keep how long a model took to wake from a light sleep, in place of what it took before.

    Args:
        spec: The model.
        total_s: Seconds from its turn, or the first request, until it was awake.
    """
    _keep(spec, WAKES, total_s)


def last_start_s(spec: ModelSpec) -> float | None:
    """Return how long a model last took to start on this machine, in seconds; None if unknown."""
    return _kept(spec, STARTS)


def last_wake_s(spec: ModelSpec) -> float | None:
    """Return how long a model last took to wake on this machine, in seconds; None if unknown."""
    return _kept(spec, WAKES)


def _keep(spec: ModelSpec, kind: str, total_s: float) -> None:
    try:
        path = _path_of(spec, kind)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=path.parent, prefix="new-", delete=False) as file:
            try:
                json.dump({"source": spec.source, "total_s": total_s}, file)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(file.name)
                raise
        _drop_oldest(path.parent)
    except (OSError, RuntimeError) as error:
        logger.info("the time is not kept among the %s: %s", kind, error)


def _kept(spec: ModelSpec, kind: str) -> float | None:
    try:
        with _path_of(spec, kind).open(encoding="utf-8") as file:
            total_s = json.loads(file.read(MAX_BYTES))["total_s"]
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return None
    is_number = isinstance(total_s, int | float) and not isinstance(total_s, bool)
    return float(total_s) if is_number and isfinite(total_s) and total_s > 0 else None


def _path_of(spec: ModelSpec, kind: str) -> Path:
    """Return the file of a kind for a model, as its entry has it loaded.

    Raises:
        RuntimeError: The user has no home.
    """
    entry = spec.entry
    parts = (spec.source, entry.revision, entry.engine, entry.quantization, entry.device)
    digest = sha256("\0".join(map(str, parts)).encode()).hexdigest()
    return cache_folder() / kind / f"{digest[:32]}.json"


def _drop_oldest(folder: Path) -> None:
    """Remove files of models that have not been started for long, beyond `MAX_MODELS`."""
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[MAX_MODELS:]:
        path.unlink(missing_ok=True)
