"""Where starting replicas say how far they are, for the ingress and for `raystream serve`.

Serve routes no call to a replica that has not started. So a thread of it writes a report into the
key-value store of Ray's control service once a second, and removes it at the end. The report of a
killed process stays until it is old and the next reader removes it.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from threading import Event, Thread
from typing import Final

import ray
from ray import serve
from ray.exceptions import RayError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.serve.exceptions import RayServeException

from deployments.contract.telemetry.start_progress import StartPhase, StartProgress, StartReport

logger = logging.getLogger("ray.serve.raystream.start")

NAMESPACE: Final = b"raystream-starts"
INTERVAL_S: Final = 1.0
OLD_S: Final = 30.0
"""Age from which a report is of a replica that was killed: a busy machine may delay one."""

Starts = Mapping[str, tuple[StartReport, ...]]
"""Reports by the name of the deployment."""


class StartBoard:
    """Keeps the report of this replica up to date, on a thread of its own."""

    def __init__(self, progress: StartProgress, interval_s: float = INTERVAL_S) -> None:
        """Begin; without Serve nothing is written.

        Args:
            progress: The start of this replica.
            interval_s: Seconds between two reports.
        """
        self._progress = progress
        self._interval_s = interval_s
        self._key = _own_key()
        self._is_over = Event()
        self._thread = Thread(target=self._run, name="start-board", daemon=True)
        if self._key is not None:
            self._thread.start()

    def close(self) -> None:
        """End the thread, which removes the report."""
        self._is_over.set()

    def _run(self) -> None:
        assert self._key is not None
        try:
            while not self._is_over.is_set():
                report = json.dumps(asdict(self._progress.report()))
                _internal_kv_put(self._key, report, namespace=NAMESPACE)
                self._is_over.wait(self._interval_s)
            _internal_kv_del(self._key, namespace=NAMESPACE)
        except (RayError, RuntimeError, OSError, ValueError) as error:
            logger.info("the progress of the start is not shown: %r", error)


def read_starts(app_name: str) -> Starts:
    """Return how far the replicas of an application are that start; this takes milliseconds.

    Nothing is returned if Ray's control service does not answer.
    """
    try:
        return _read(f"{app_name}#")
    except (RayError, RuntimeError, OSError) as error:
        logger.info("the progress of starts is not known: %r", error)
        return {}


def _read(prefix: str) -> Starts:
    found: dict[str, list[StartReport]] = {}
    for key in _internal_kv_list(prefix, namespace=NAMESPACE):
        value = _internal_kv_get(key, namespace=NAMESPACE)
        if value is None:  # removed meanwhile
            continue
        told = json.loads(value)
        report = StartReport(**{**told, "phase": StartPhase(told["phase"])})
        if time.time() - report.unix_s >= OLD_S:
            _internal_kv_del(key, namespace=NAMESPACE)  # else a crash loop leaves ever more
        else:
            found.setdefault(key.decode().split("#")[1], []).append(report)
    return {name: tuple(sorted(r, key=lambda each: each.replica_id)) for name, r in found.items()}


def _own_key() -> str | None:
    """Return the key of this replica's report; None if Serve does not run it."""
    if not ray.is_initialized():
        return None
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    return f"{context.app_name}#{context.deployment}#{context.replica_id.unique_id}"
