"""What Ray's workers write to the terminal: warnings, errors, and which models are ready.

Serve's controller, its proxies and its replicas each write their log into a file, and everything
again to standard error, which Ray carries to the terminal. Serve has one switch for the second,
which would silence errors too. But it honours a mark on a record, and this module sets the mark.

Ray calls `keep_info_in_files` at the start of each worker, as its `worker_process_setup_hook`.
"""

import logging
import re
from typing import Final

USELESS_WARNINGS: Final = re.compile(
    # True, and as it should be: this server is one node, and listens where the file says.
    r"HTTPOptions\.host='.*' won't accept connections from HAProxy on other nodes"
    # Large models take longer, and `raystream-serve` names the models that it waits for.
    r"|Deployment .* that have taken more than \d+s to initialize"
    # On a busy machine. It is asked again.
    r"|Proxy actor readiness check .* didn't complete|Proxy actor reported not ready"
)
"""Warnings on which a user of one machine can't act. The files have them."""


def keep_info_in_files() -> None:
    """Keep the INFO lines of Serve's own logger in its files, and off the terminal.

    raystream's lines come from loggers below Serve's, which a filter of Serve's logger does not
    touch.
    """
    logging.getLogger("ray.serve").addFilter(_mark)


def _mark(record: logging.LogRecord) -> bool:
    if record.levelno < logging.WARNING or USELESS_WARNINGS.match(record.getMessage()):
        # Serve's own handlers read this attribute: `log_to_stderr_filter` in its logging_utils.
        record.log_to_stderr = False
    return True
