import io
import logging
import sys
from collections.abc import Iterator
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
from ray._private import worker
from ray.serve._private.logging_utils import configure_component_logger
from ray.serve.schema import LoggingConfig

from serve_app.commands.run.worker_logs import (
    hide_crash_reports,
    is_set_up,
    keep_info_in_files,
    set_up_worker,
)


@pytest.fixture
def logger(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    """Return Serve's logger, which is as before after the test."""
    logger = logging.getLogger("ray.serve")
    for name in ("filters", "handlers", "level", "propagate"):
        value = getattr(logger, name)
        monkeypatch.setattr(logger, name, value[:] if isinstance(value, list) else value)
    yield logger
    for handler in logger.handlers:
        if isinstance(handler, MemoryHandler) and handler.target is not None:
            handler.target.close()
        handler.close()


@pytest.fixture
def file(tmp_path: Path, logger: logging.Logger) -> Path:
    """Return the log file of a worker that Ray has called the hook in."""
    keep_info_in_files()
    configure_component_logger(
        component_name="controller",
        component_id="1",
        logging_config=LoggingConfig(logs_dir=str(tmp_path)),
        max_bytes=0,
        backup_count=0,
    )
    return tmp_path / "controller_1.log"


@pytest.fixture
def terminal(logger: logging.Logger, file: Path) -> io.StringIO:
    """Return what the worker writes to standard error."""
    written = io.StringIO()
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(written)
    return written


def test_a_worker_imports_from_the_working_directory_last(
    logger: logging.Logger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["installed"])
    set_up_worker()
    assert sys.path == ["installed", str(tmp_path)]


@pytest.mark.parametrize(
    ("level", "message"),
    [
        (logging.INFO, "HAProxy started successfully."),
        (
            logging.WARNING,
            "HTTPOptions.host='127.0.0.1' won't accept connections from HAProxy on other nodes; "
            "cross-node routing will fail with connection refused.",
        ),
        (
            logging.WARNING,
            "Deployment 'pydoc-chat' in application 'raystream' has 1 replicas that have taken "
            "more than 30s to initialize.\nThis may be caused by a slow __init__ or reconfigure "
            "method.",
        ),
        (logging.WARNING, "Proxy actor readiness check for proxy on 5ba7 didn't complete in 5.0s."),
        (
            logging.ERROR,
            "Exception in Replica(id='9dxr6062', deployment='m', app='raystream'), the replica "
            "will be stopped.\nTraceback (most recent call last):",
        ),
        (logging.ERROR, "The deployments ['pydoc-chat'] are UNHEALTHY."),
        (
            logging.WARNING,
            "Replica Replica(id='9dxr6062', deployment='m', app='raystream') failed health check, "
            "stopping it.",
        ),
    ],
)
def test_what_a_user_can_t_act_on_is_only_in_the_file(
    logger: logging.Logger, file: Path, terminal: io.StringIO, level: int, message: str
) -> None:
    logger.log(level, message, extra={"log_to_stderr": True})
    assert message in file.read_text()
    assert terminal.getvalue() == ""


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_warnings_and_errors_are_in_the_file_and_on_the_terminal(
    logger: logging.Logger, file: Path, terminal: io.StringIO, level: int
) -> None:
    message = "Deployment 'x' has 1 replicas that have taken more than 30s to be scheduled."
    logger.log(level, message)
    assert message in file.read_text()
    assert message in terminal.getvalue()


def test_the_one_line_of_a_death_is_on_the_terminal(
    logger: logging.Logger, file: Path, terminal: io.StringIO
) -> None:
    message = "Actor for Replica(id='9dxr6062', deployment='m', app='raystream') crashed, marking"
    logger.warning(message)
    assert message in terminal.getvalue()


def test_ray_s_report_of_a_crash_is_not_on_the_driver_s_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(
        worker, "print_to_stdstream", lambda data, ignore_prefix: told.extend(data["lines"])
    )
    hide_crash_reports()
    for line in (
        "A worker died or was killed while executing a task by an unexpected system error. To",
        "1 Workers (tasks / actors) killed due to memory pressure (OOM)",
    ):
        worker.print_to_stdstream({"lines": [line]}, ignore_prefix=False)
    assert told == ["1 Workers (tasks / actors) killed due to memory pressure (OOM)"]


def test_raystream_s_own_lines_stay_on_the_terminal(file: Path, terminal: io.StringIO) -> None:
    logging.getLogger("ray.serve.raystream.replica").info("pydoc-chat is ready")
    assert "pydoc-chat is ready" in file.read_text()
    assert "pydoc-chat is ready" in terminal.getvalue()


def test_the_access_log_is_only_in_the_file(file: Path, terminal: io.StringIO) -> None:
    logging.getLogger("ray.serve.raystream.access").info(
        '{"event":"request"}', extra={"log_to_stderr": False}
    )
    assert '{"event":"request"}' in file.read_text()
    assert terminal.getvalue() == ""


def test_a_worker_of_raystream_serve_is_known_by_its_mark(
    logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setattr(logger, "filters", [])
    assert not is_set_up()
    set_up_worker()
    assert is_set_up()
