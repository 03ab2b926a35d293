"""Reads a run from its directory, even one that crashed.

`requests.jsonl` is flushed after each request and `summary.json` is written at the start, so a
crashed run can be read up to its last complete line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from loadtest.results.record import LevelRecord, RequestRecord
from loadtest.results.run_files import REQUESTS_NAME, SCHEMA_VERSION, SUMMARY_NAME
from loadtest.results.summary import RunHeader


class RunError(ValueError):
    """A directory holds no readable run; the message names the file and the fault."""


@dataclass(frozen=True, slots=True)
class Run:
    """The content of a run's files.

    Attributes:
        path: The run's directory.
        header: `summary.json` without the results.
        records: All requests, in the order of the file.
        levels: All levels in order; the end of one cut off by a crash comes from its records.
    """

    path: Path
    header: RunHeader
    records: tuple[RequestRecord, ...]
    levels: tuple[LevelRecord, ...]

    @property
    def configuration(self) -> dict[str, Any]:
        """The run's configuration, without secrets."""
        return self.header.configuration

    @property
    def machine(self) -> dict[str, Any]:
        """The machine that sent the load."""
        return self.header.machine

    def records_of(self, level: LevelRecord) -> list[RequestRecord]:
        """List the requests of one level."""
        return [record for record in self.records if record.level == level.index]


def read_run(run_dir: Path) -> Run:
    """Read a run's directory.

    Raises:
        RunError: A file is missing, is not a run's, or was written by a newer version.
    """
    header = _read_header(run_dir / SUMMARY_NAME)
    records = _read_records(run_dir / REQUESTS_NAME)
    known = {level.index: level for level in header.levels}
    levels = []
    for index in sorted({*known, *(record.level for record in records)}):
        of_level = [record for record in records if record.level == index]
        levels.append(_ended_level(known.get(index), of_level, header.configuration))
    return Run(run_dir, header, records, tuple(levels))


def _read_header(path: Path) -> RunHeader:
    try:
        document = json.loads(path.read_bytes())
        header = RunHeader.model_validate(document)
    except OSError as error:
        raise RunError(
            f"{path}: can't be read ({error.strerror}); is this a run's directory?"
        ) from error
    except (ValueError, ValidationError) as error:
        raise RunError(f"{path}: not a run's summary: {error}") from error
    if header.schema_version > SCHEMA_VERSION:
        raise RunError(
            f"{path}: written by a newer loadtest (schema {header.schema_version}, "
            f"this one knows {SCHEMA_VERSION})"
        )
    return header


def _read_records(path: Path) -> tuple[RequestRecord, ...]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"{path}: can't be read ({error.strerror})") from error
    return parse_records(path, content)


def parse_records(path: Path, content: bytes) -> tuple[RequestRecord, ...]:
    """Parse the complete lines of `requests.jsonl`; skip a last line that was cut off.

    Raises:
        RunError: A complete line holds no record; `path` names the file.
    """
    *whole_lines, _cut_off = content.split(b"\n")
    return tuple(_read_record(path, number, line) for number, line in enumerate(whole_lines, 1))


def _read_record(path: Path, number: int, line: bytes) -> RequestRecord:
    try:
        return RequestRecord.model_validate_json(line)
    except ValidationError as error:
        raise RunError(f"{path}, line {number}: not a request's record: {error}") from error


def _ended_level(
    level: LevelRecord | None, records: Sequence[RequestRecord], configuration: dict[str, Any]
) -> LevelRecord:
    """Return a level with its end, taken from its records if the tool did not write it."""
    if level and level.ended_s > level.started_s:
        return level
    if level is None:
        level = _unwritten_level(records, configuration)
    sent = [record.sent_s for record in records if not record.is_warmup]
    ended_s = max((record.ended_s for record in records), default=level.started_s)
    warm_s = max(level.warm_s, min(sent, default=ended_s))
    return level.model_copy(update={"warm_s": warm_s, "ended_s": ended_s, "was_stopped": True})


def _unwritten_level(
    records: Sequence[RequestRecord], configuration: dict[str, Any]
) -> LevelRecord:
    queues = {record.queue for record in records if record.queue is not None}
    started_s = min(record.sent_s for record in records)
    index, rates = records[0].level, configuration.get("rate") or [None]
    return LevelRecord(
        index=index,
        num_queues=len(queues) or None,
        rate_per_s=None if queues else rates[index % len(rates)],
        started_s=started_s,
        warm_s=started_s,
        ended_s=started_s,
    )
