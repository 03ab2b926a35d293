"""What Ray's workers write to the terminal: warnings, errors, and which models are ready.

Serve's controller, its proxies and its replicas each write their log into a file, and everything
again to standard error, which Ray carries to the terminal. Serve has one switch for the second,
which would silence errors too. But it honours a mark on a record, and this module sets the mark.

Ray calls `set_up_worker` at the start of each worker, as its `worker_process_setup_hook`.
"""

import logging
import os
import re
import sys
from typing import Any, Final

from ray._private import worker

CRASH_REPORT: Final = "A worker died or was killed while executing a task by an unexpected system"

FOR_THE_FILE: Final = re.compile(
    # True, and as it should be: this server is one node, and listens where the file says.
    r"HTTPOptions\.host='.*' won't accept connections from HAProxy on other nodes"
    # Large models take longer, and `raystream serve` names the models that it waits for.
    r"|Deployment .* that have taken more than \d+s to initialize"
    # On a busy machine. It is asked again.
    r"|Proxy actor readiness check .* didn't complete|Proxy actor reported not ready"
    # Another server on this machine; the next port is tried.
    r"|Failed to start RequestProtocol.* Retrying"
    # The replica has said why in one line, and `raystream serve` says it again as the last one.
    r"|Exception in Replica|Failed to update the deployments"
    # What follows from "Actor for Replica ... crashed", which is one line for one death.
    r"|Replica .* failed health check, stopping it|The deployments .* are UNHEALTHY"
    r"|Replica.* is temporarily unavailable|Failed to (?:fetch|get) queue length"
    r"|Replica health check failed"
)
"""Warnings and errors on which a user of one machine can't act, or that repeat another one."""


def set_up_worker() -> None:
    """Keep INFO lines off the terminal, and import from the working directory last.

    A policy of the user's own may lie there, and so may a module named like one of ours.
    """
    keep_info_in_files()
    sys.path.append(os.getcwd())


def is_set_up() -> bool:
    """Return whether this process belongs to `raystream serve`, which shows what users see."""
    return _mark in logging.getLogger("ray.serve").filters


def keep_info_in_files() -> None:
    """Keep the INFO lines of Serve's own logger in its files, and off the terminal.

    raystream's lines come from loggers below Serve's, which a filter of Serve's logger does not
    touch.
    """
    logging.getLogger("ray.serve").addFilter(_mark)


def hide_crash_reports() -> None:
    """Keep Ray's own report of a worker's crash, of a dozen rows, off the driver's terminal.

    Serve's controller names the replica in one line. Ray's driver prints what its node reports by
    this private function; a Ray without it fails at import, so we would notice.
    """
    tell = worker.print_to_stdstream

    def tell_others(data: dict[str, Any], ignore_prefix: bool) -> None:
        if not any(line.startswith(CRASH_REPORT) for line in data["lines"]):
            tell(data, ignore_prefix)

    worker.print_to_stdstream = tell_others


def _mark(record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING or FOR_THE_FILE.match(record.getMessage()):
        # Serve's own handlers read this attribute: `log_to_stderr_filter` in its logging_utils.
        record.log_to_stderr = False
    return True
