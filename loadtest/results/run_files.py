"""The files of a run while it is being written: `summary.json` and `requests.jsonl`.

Nothing that was measured is lost: a request's line is handed to the operating system when the
request ends, and the summary is replaced as a whole, first before the first request. Analysing
adds its results to the summary later; it stands in `report_files`.
"""

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from loadtest.record import LevelRecord, RequestRecord
from loadtest.summary import RunHeader

SCHEMA_VERSION: Final = 1
"""Of both files. It rises when a reader of the old form would misread the new one."""

SUMMARY_NAME: Final = "summary.json"
REQUESTS_NAME: Final = "requests.jsonl"


class RunFiles:
    """The directory of a run that is under way.

    Attributes:
        directory: Where the files lie.
    """

    def __init__(
        self, directory: Path, configuration: Mapping[str, Any], machine: Mapping[str, Any]
    ) -> None:
        """Make the directory and both files.

        Args:
            directory: Made if it is missing; it must not hold a run.
            configuration: All of it, without secrets.
            machine: What the load came from.

        Raises:
            FileExistsError: The directory holds a run already.
        """
        self.directory = directory
        self._configuration = dict(configuration)
        self._machine = dict(machine)
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        directory.mkdir(parents=True, exist_ok=True)
        self._requests: IO[bytes] = (directory / REQUESTS_NAME).open("xb", buffering=0)
        self.write_summary("running", [])

    def add(self, record: RequestRecord) -> None:
        """Append a request's line; it survives the tool's end from now on."""
        self._requests.write(record.model_dump_json().encode() + b"\n")

    def write_summary(
        self, status: str, levels: Sequence[LevelRecord], gpus: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        """Replace the summary.

        Args:
            status: "running", "finished" or "stopped".
            levels: Those that have begun. One that has not ended yet says so by `ended_s` equal
                to `started_s`.
            gpus: What was seen of GPUs, each sample with its time, `t_s`.
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
    """Write a file as a whole: whoever reads it meanwhile has the old one or the new one."""
    draft = path.with_name(path.name + ".new")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
