"""`raystream demo` as users run it: a kill or a text that is parked, and what is left behind."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from serve_app.commands.server_environment import is_free
from tests.ray.serve_run import WITH_SIGNALS, wait_until

DEADLINE_S = 400
STOP_S = 60

pytestmark = pytest.mark.slow

Demo = tuple[subprocess.Popen[str], Path]


@pytest.fixture
def demo(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Demo]:
    """Start it, as from a terminal but without one, with the options of the test's parameter."""
    # A variable with a user's keys changes nothing: the server is the demo's own.
    environment = {**os.environ, "HOME": str(tmp_path), "RAYSTREAM_API_KEYS": "x" * 32}
    output = tmp_path / "output"
    command = [sys.executable, "-m", "serve_app", "demo", "--save-svg", str(tmp_path / "demo.svg")]
    command += getattr(request, "param", ())
    with output.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", WITH_SIGNALS, *command],
            cwd=tmp_path, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    yield process, output
    for each in family_of(process):
        each.kill()
    process.kill()
    process.wait()


def family_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def has_told(demo: Demo, text: str) -> bool:
    process, output = demo
    assert process.poll() is None or text in output.read_text(), output.read_text()
    return text in output.read_text()


def check_left_behind(family: list[psutil.Process], output: Path) -> None:
    wait_until(lambda: not any(each.is_running() for each in family), STOP_S)
    url = re.search(r"The page: (\S+)", output.read_text())
    assert url is not None
    port = urlsplit(url[1]).port
    assert port is not None
    assert is_free("127.0.0.1", port)


def test_a_replica_is_killed_and_all_answers_are_equal(demo: Demo) -> None:
    process, output = demo
    wait_until(lambda: has_told(demo, " killed (pid "), DEADLINE_S)
    family = family_of(process)
    assert process.wait(DEADLINE_S) == 0
    lines = output.read_text().splitlines()
    assert lines[-2:] == ["3 of 3 equal, 0 tokens lost", "Stopping the server."]
    assert any(re.search(r"tokens, moved after \d+ tokens with a pause of", line) for line in lines)
    check_left_behind(family, output)
    assert "3 of 3 equal" in (output.parent / "demo.svg").read_text().replace("&#160;", " ")
    assert {each.name for each in output.parent.iterdir()} <= {
        *("output", "demo.svg", ".ray"),
        ".cache",  # compiled kernels, in the home of this run
    }


@pytest.mark.soak  # its twin, within one process: tests/serve_app/commands/user/demo/test_demo.py
@pytest.mark.parametrize("demo", [("--parking",)], indirect=True)
def test_a_slow_answer_is_parked_for_a_chat_and_is_equal(demo: Demo) -> None:
    process, output = demo
    wait_until(lambda: has_told(demo, "The page: "), DEADLINE_S)
    family = family_of(process)
    assert process.wait(DEADLINE_S) == 0, output.read_text()
    lines = output.read_text().splitlines()
    assert lines[-2:] == ["1 of 1 equal, 0 tokens lost", "Stopping the server."]
    batch, chat = (next(line for line in lines if line.startswith(f"{n}: ")) for n in (1, 2))
    assert re.search(r"priority 5: .* parked after \d+ tokens with a pause of", batch)
    assert "parked" not in chat
    check_left_behind(family, output)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_it_leaves_nothing_behind(demo: Demo, number: signal.Signals) -> None:
    process, output = demo
    wait_until(lambda: has_told(demo, "The page: "), DEADLINE_S)
    family = family_of(process)
    assert any("raylet" in each.name() for each in family)
    process.send_signal(number)
    assert process.wait(STOP_S) == 128 + number
    check_left_behind(family, output)
    assert "Traceback" not in output.read_text()
