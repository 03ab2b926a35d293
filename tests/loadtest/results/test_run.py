import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.results.record import LevelRecord
from loadtest.results.run import RunError, parse_records, read_run
from tests.loadtest.made_runs import made_level, made_request, write_run


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    level, records = made_level(2, loops=3)
    run = read_run(write_run(tmp_path / "run", [(level, records)], {"seed": 7}))
    assert run.levels == (level,)
    assert list(run.records) == records
    assert run.configuration["seed"] == 7
    assert run.machine["hostname"] == "bench-1"
    assert run.records_of(level) == records


@given(st.data())
def test_a_file_cut_anywhere_is_read_up_to_its_last_whole_line(data: st.DataObject) -> None:
    records = [made_request(index, error_message="größer \n\u2028") for index in range(3)]
    content = b"".join(record.model_dump_json().encode() + b"\n" for record in records)
    cut = data.draw(st.integers(0, len(content)))
    read = parse_records(Path("requests.jsonl"), content[:cut])
    assert list(read) == records[: content[:cut].count(b"\n")]


def test_a_level_that_a_crash_left_open_ends_with_its_last_record(tmp_path: Path) -> None:
    open_level = LevelRecord(index=0, num_queues=2, started_s=0, warm_s=0, ended_s=0)
    _, records = made_level(2, loops=2)
    run = read_run(write_run(tmp_path / "run", [(open_level, records)], status="running"))
    assert run.levels[0].ended_s == max(record.ended_s for record in records)
    assert run.levels[0].was_stopped


def test_a_level_that_was_never_written_is_made_from_its_records(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [made_level(2, loops=2)], status="running")
    document = json.loads((path / "summary.json").read_text()) | {"levels": []}
    (path / "summary.json").write_text(json.dumps(document))
    (level,) = read_run(path).levels
    assert (level.num_queues, level.was_stopped) == (2, True)


def test_a_rate_that_was_never_written_is_taken_from_the_configuration(tmp_path: Path) -> None:
    records = [made_request(level=1, queue=None)]
    level, _ = made_level(1)
    path = write_run(tmp_path / "run", [(level, records)], {"rate": [2.0, 4.0]})
    document = json.loads((path / "summary.json").read_text()) | {"levels": []}
    (path / "summary.json").write_text(json.dumps(document))
    (found,) = read_run(path).levels
    assert found.rate_per_s == 4.0


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is this a run's directory"):
        read_run(tmp_path)


def test_an_invalid_line_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [made_level(1, loops=1)])
    with (path / "requests.jsonl").open("a") as file:
        file.write("{}\n")
    with pytest.raises(RunError, match="line 2"):
        read_run(path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [])
    document = json.loads((path / "summary.json").read_text()) | {"schema_version": 99}
    (path / "summary.json").write_text(json.dumps(document))
    with pytest.raises(RunError, match="newer"):
        read_run(path)


def test_a_token_source_of_an_older_version_is_named(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [made_level(1, loops=1)])
    lines = (path / "requests.jsonl").read_text()
    (path / "requests.jsonl").write_text(lines.replace('"usage"', '"tokenizer"'))
    with pytest.raises(
        RunError, match=r"line 1.*\n.*token_source\n.*'usage', 'events' or 'chunks'"
    ):
        read_run(path)
