import os
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.vllm_engine.failures import FailureRecord, report


def test_each_failure_is_taken_once() -> None:
    record = FailureRecord()
    assert record.take() == set()
    report(record.path, "a")
    report(record.path, "a name\nof two lines")
    assert record.take() == {"a", "a name\nof two lines"}
    assert record.take() == set()
    record.close()


def test_a_worker_in_another_process_reports() -> None:
    record = FailureRecord()
    code = f"from deployments.vllm_engine.failures import report; report({record.path!r}, 'a')"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.getcwd())
    assert record.take() == {"a"}
    record.close()


def test_a_report_without_a_scheduler_is_an_os_error() -> None:
    record = FailureRecord()
    record.close()
    with pytest.raises(OSError, match="No such file"):
        report(record.path, "a")


def test_a_path_that_leads_to_a_file_of_another_process_is_left_as_it_is(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    with theirs.open("w") as file, pytest.raises(OSError, match="is not the scheduler's"):
        report(f"/proc/{os.getpid()}/fd/{file.fileno()}", "a")
    assert theirs.read_text() == ""
