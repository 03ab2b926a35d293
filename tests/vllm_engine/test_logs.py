import json
import logging
import logging.config
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from deployments.vllm_engine.logs import SILENT, VARIABLE, Cause, EngineLogs, remove_inherited


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLogs]:
    monkeypatch.setenv(VARIABLE, "")
    made = EngineLogs(tmp_path / "vllm.log")
    made.prepare()
    config = json.loads(Path(os.environ[VARIABLE]).read_text())
    del config["loggers"]["deployments"]  # that of the tests
    logging.config.dictConfig(config)
    yield made
    made.close()
    for name in ("vllm", SILENT):
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).setLevel(logging.NOTSET)


def fail(why: str) -> None:
    try:
        raise ValueError(why)
    except ValueError:
        logging.getLogger("vllm.core").exception("EngineCore failed to start.")


def test_an_exception_is_one_line_on_the_terminal_and_whole_in_the_file(
    logs: EngineLogs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fail("too little\nmemory")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ERROR ")
    assert line.endswith("EngineCore failed to start. too little memory")
    assert "Traceback" in (tmp_path / "vllm.log").read_text()


def test_the_first_cause_of_a_start_led_to_the_others_and_the_last_ended_an_engine_that_ran(
    logs: EngineLogs,
) -> None:
    assert (logs.first_cause(), logs.last_cause()) == (None, None)
    fail("the root")
    fail("what followed")
    assert logs.first_cause() == Cause("ValueError", "the root")
    assert logs.last_cause() == Cause("ValueError", "what followed")


def test_neither_warnings_nor_others_errors_nor_the_news_of_the_end_are_causes(
    logs: EngineLogs,
) -> None:
    class EngineDeadError(Exception):
        """As vLLM's."""

    error = ValueError("an optional package is missing")
    logging.getLogger("vllm.config").warning("not compiled", exc_info=error)
    assert logs.first_cause() is None
    fail("the root")
    logging.getLogger("vllm.engine").error("the handler failed", exc_info=EngineDeadError())
    assert logs.last_cause() == Cause("ValueError", "the root")


def test_what_a_worker_of_ray_raised_is_told_without_ray_s_lines(logs: EngineLogs) -> None:
    made: Any = RayTaskError  # Ray leaves it untyped
    error = made("load", "a traceback\nof many lines", ValueError("no kernel for heads of 7"))
    logging.getLogger("vllm.core").error("failed", exc_info=error.as_instanceof_cause())
    assert logs.first_cause() == Cause("ValueError", "no kernel for heads of 7")


def test_half_a_line_of_a_killed_process_hides_no_other(logs: EngineLogs) -> None:
    fail("the root")
    with logs._causes.open("a") as file:
        file.write('["ValueEr')
    assert logs.last_cause() == Cause("ValueError", "the root")


def test_the_folder_of_a_killed_replica_is_removed_and_no_other(
    logs: EngineLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    remove_inherited()
    assert tmp_path.exists()
    assert logs._folder.exists()
    logs.prepare()
    remove_inherited()
    assert not logs._folder.exists()


def test_warnings_of_vllm_go_to_the_file_only(
    logs: EngineLogs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("vllm.config").warning("a custom scheduler")
    assert capsys.readouterr().err == ""
    assert "a custom scheduler" in (tmp_path / "vllm.log").read_text()


def test_the_parameters_of_requests_are_not_logged(logs: EngineLogs, tmp_path: Path) -> None:
    logging.getLogger(SILENT).error("SchedulerOutput(a client's grammar)")
    assert not (tmp_path / "vllm.log").exists()
