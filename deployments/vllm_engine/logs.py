"""Logs of vLLM's processes, and why they ended.

vLLM's own handlers write warnings about how it was configured, whole tracebacks, and after a failed
step the parameters of every request to the terminal. Here an error is one line there, as the
server's other lines are, and a file has the rest.

EngineCore is a process of its own, and says of a failed start only that it failed. So the handler
also writes the reason of each exception down. The replica reads the first one of a start, which led
to the others, and the last one of an engine that ran: those before did not end it.

Needs no vLLM: `prepare` is called before vLLM is imported, which configures its loggers.
"""

import json
import logging
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Final

from ray.exceptions import RayTaskError

from deployments.contract.unsupported_model import reason_of

PREFIX: Final = "raystream-vllm-"
"""How the names of the folders begin."""
VARIABLE: Final = "VLLM_LOGGING_CONFIG_PATH"
SILENT: Final = "vllm.logging_utils.dump_input"
"""It logs the parameters of all requests of a failed step, with grammars, and is left out."""

ENDED: Final = "EngineDeadError"
"""The exception with which vLLM tells the replica that EngineCore has ended; it is no cause."""

FORMAT: Final = "%(levelname)s %(asctime)s %(name)s %(process)d -- %(message)s"
"""As Serve's lines are."""


@dataclass(frozen=True, slots=True)
class Cause:
    """An exception in one of vLLM's processes.

    Attributes:
        kind: The name of its class.
        reason: Its message, in one line.
    """

    kind: str
    reason: str


class EngineLogs:
    """The files that vLLM's processes write to."""

    def __init__(self, file: Path | None = None) -> None:
        """Make the configuration that vLLM reads.

        Args:
            file: Takes all records, with their tracebacks; None keeps none.
        """
        self._folder = Path(mkdtemp(prefix=PREFIX))
        self._causes = self._folder / "causes"
        handler = {
            "()": f"{EngineHandler.__module__}.{EngineHandler.__qualname__}",
            "causes": str(self._causes),
            "file": None if file is None else str(file),
        }
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "handlers": {"raystream": handler},
            "loggers": {
                "vllm": {"handlers": ["raystream"], "level": "WARNING", "propagate": False},
                SILENT: {"level": "CRITICAL"},
                # It runs in EngineCore, where no logger of Ray Serve has a handler.
                "deployments": {"handlers": ["raystream"], "level": "WARNING", "propagate": False},
            },
        }
        self._config = self._folder / "logging.json"
        self._config.write_text(json.dumps(config))

    def prepare(self) -> None:
        """Have vLLM take the configuration, in this process and in those that it starts."""
        os.environ[VARIABLE] = str(self._config)

    def first_cause(self) -> Cause | None:
        """Return the first exception that was logged, which led to the others; None for none."""
        return next(iter(self._read_causes()), None)

    def last_cause(self) -> Cause | None:
        """Return the last exception that was logged; None for none."""
        return next(reversed(self._read_causes()), None)

    def _read_causes(self) -> list[Cause]:
        """Return all causes; a process that was killed may have left half a line."""
        causes = []
        with suppress(OSError):
            for line in self._causes.read_text(errors="replace").splitlines():
                with suppress(ValueError, TypeError):
                    causes.append(Cause(*json.loads(line)))
        return causes

    def close(self) -> None:
        """Delete what nothing reads any more."""
        if os.environ.get(VARIABLE) == str(self._config):
            del os.environ[VARIABLE]
        shutil.rmtree(self._folder, ignore_errors=True)


def remove_inherited() -> None:
    """Delete the folder of the replica that started this process, and can't do it any more."""
    folder = Path(os.environ.get(VARIABLE, "")).parent
    if folder.name.startswith(PREFIX):
        shutil.rmtree(folder, ignore_errors=True)


class EngineHandler(logging.Handler):
    """Writes records to standard error in one line each, and exceptions to files."""

    def __init__(self, causes: str, file: str | None) -> None:
        """Open no file yet: a process without a failure writes none."""
        super().__init__()
        self._causes = causes
        self._file = file
        self.setFormatter(logging.Formatter(FORMAT))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; an error of a file costs that file's line only."""
        try:
            error = _told(record.exc_info[1]) if record.exc_info else None
            line = " ".join(record.getMessage().split())
            if error is not None:
                line = f"{line} {reason_of(error)}"
                if record.levelno >= logging.ERROR and _is_vllm(record):
                    self._note_cause(error)
            if self._file is not None:
                self._append(self._file, self.format(record))
            if record.levelno < logging.ERROR and _is_vllm(record):
                return  # a dozen lines at each start, about what raystream has chosen
            shown = logging.makeLogRecord(
                {**record.__dict__, "msg": line, "args": (), "exc_info": None, "exc_text": None}
            )
            sys.stderr.write(f"{self.format(shown)}\n")
        except Exception:  # noqa: BLE001 - no error of a log may end the engine
            self.handleError(record)

    def _note_cause(self, error: BaseException) -> None:
        kind = type(error).__name__
        if kind != ENDED:
            self._append(self._causes, json.dumps([kind, reason_of(error)]))

    def _append(self, path: str, text: str) -> None:
        with open(path, "a") as file:
            file.write(f"{text}\n")


def _told(error: BaseException | None) -> BaseException | None:
    """Return an exception, or what it carries: of a worker's, Ray raises one with all its lines."""
    return (getattr(error, "cause", None) or error) if isinstance(error, RayTaskError) else error


def _is_vllm(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == "vllm"
