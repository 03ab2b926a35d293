"""Writes the files of a run in progress: `summary.json` and `requests.jsonl`.

No measurement is lost in a crash: a request's line goes to the operating system when the request
ends. The summary exists before the first request and is always replaced atomically. `report_files`
adds the analysis to the summary later.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from loadtest.results.record import LevelRecord, RequestRecord
from loadtest.results.summary import RunHeader

SCHEMA_VERSION: Final = 1
"""The version of both files. It rises when an older reader would misread them."""

SUMMARY_NAME: Final = "summary.json"
REQUESTS_NAME: Final = "requests.jsonl"


class RunFiles:
    """The directory of a run in progress.

    Attributes:
        directory: The directory of the files.
    """

    def __init__(
        self, directory: Path, configuration: Mapping[str, Any], machine: Mapping[str, Any]
    ) -> None:
        """Create the directory and both files.

        Args:
            directory: Created if it is missing; it must not hold a run.
            configuration: The whole configuration, without secrets.
            machine: The machine that sends the load.

        Raises:
            FileExistsError: The directory already holds a run.
        """
        self.directory = directory
        self._configuration = dict(configuration)
        self._machine = dict(machine)
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        directory.mkdir(parents=True, exist_ok=True)
        self._requests: IO[bytes] = (directory / REQUESTS_NAME).open("xb", buffering=0)
        self.write_summary("running", [])

    def add(self, record: RequestRecord) -> None:
        """Append a request's line; from then on a crash of the tool does not lose it."""
        self._requests.write(record.model_dump_json().encode() + b"\n")

    def write_summary(
        self, status: str, levels: Sequence[LevelRecord], gpus: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Replace the summary.

        Args:
            status: "running", "finished" or "stopped".
            levels: The levels that have begun. In one that has not ended, `ended_s` equals
                `started_s`.
            gpus: The GPU samples, each with its time, `t_s`.
        """
        header = RunHeader(
            schema_version=SCHEMA_VERSION,
            status=status,
            started_at=self._started_at,
            configuration=self._configuration,
            machine=self._machine,
            levels=tuple(levels),
            gpus=tuple(dict(sample) for sample in gpus),
        )
        replace(self.directory / SUMMARY_NAME, header.model_dump_json(indent=1) + "\n")

    def close(self) -> None:
        """Close the file of requests; closing twice is harmless."""
        self._requests.close()


def replace(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old content or the new one."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
