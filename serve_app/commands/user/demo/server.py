"""The demo's own server: replicas of pydoc-chat, for this machine only, that end with it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from serve_app.commands.run.announcement import is_ready
from serve_app.commands.run.process_ties import die_with_parent
from serve_app.commands.run.supervise import STOP_S
from serve_app.commands.server_environment import free_ports
from serve_app.keys.api_keys import ENVIRONMENT_VARIABLE
from serve_app.shipped_files import CONFIG

MODEL: Final = "pydoc-chat"
LOCAL: Final = "127.0.0.1"
POLL_S: Final = 0.2
LAST_LINES: Final = 15


class DemoError(Exception):
    """The demo can't show anything; the message says why."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a server is.

    Attributes:
        num_replicas: Replicas of the model.
        max_num_seqs: Sequences that each runs at once.
        told: The same in words.
    """

    num_replicas: int
    max_num_seqs: int | Literal["auto"]
    told: str


TWO_REPLICAS: Final = Size(2, "auto", "two replicas of pydoc-chat")
ONE_PLACE: Final = Size(1, 1, "one replica of pydoc-chat, which runs one text at a time")


def demo_config(shipped: Mapping[str, Any], port: int, size: Size) -> dict[str, Any]:
    """Return the shipped configuration with one ingress and one model of this size.

    Each replica computes with one thread on a CPU, so that the demo is the same on all machines.
    It needs no key: in a checkout the file may be changed, and the demo has no key to send.

    Raises:
        DemoError: The model is not in the configuration.
    """
    (application,) = shipped["applications"]
    models = {model["id"]: model for model in application["args"]["models"]}
    sections = {section["name"]: section for section in application["deployments"]}
    if MODEL not in models or MODEL not in sections:
        raise DemoError(f"{CONFIG} has no model {MODEL}, which the demo shows")
    model = {**models[MODEL], "device": "cpu", "num_cpus": 0.3, "num_threads": 1}
    model["max_num_seqs"] = size.max_num_seqs
    deployments = [
        {**_without(sections[name], "autoscaling_config"), "num_replicas": num}
        for name, num in (("Ingress", 1), (MODEL, size.num_replicas))
    ]
    args = {**application["args"], "auth": {}, "models": [model]}
    return {
        **shipped,
        "http_options": {**shipped["http_options"], "host": LOCAL, "port": port},
        "applications": [{**application, "args": args, "deployments": deployments}],
    }


def _without(section: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name != key}


@dataclass(frozen=True)
class DemoServer:
    """A server that has been started.

    Attributes:
        url: Where it answers.
        process: Its supervisor.
        log: What it writes.
    """

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_until_ready(self) -> None:
        """Return when its models are loaded.

        Raises:
            DemoError: It has ended.
        """
        while not is_ready(self.url):
            if self.process.poll() is not None:
                raise DemoError(f"the server did not start:\n{_last_lines(self.log)}")
            time.sleep(POLL_S)


@contextmanager
def serving(tell: Callable[[str], None], size: Size = TWO_REPLICAS) -> Iterator[DemoServer]:
    """Start the server, and stop it at the end; `tell` shows that to the user.

    Raises:
        DemoError: There is no folder for its file.
    """
    with _folder() as name:
        folder, (port,) = Path(name), free_ports(1)
        document = demo_config(yaml.safe_load(CONFIG.read_text(encoding="utf-8")), port, size)
        (folder / "serve_config.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
        process = _start(folder)
        try:
            yield DemoServer(f"http://{LOCAL}:{port}", process, folder / "log")
        finally:
            # The end must not be cut short: what is left of the server would stay.
            for number in (signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            if process.poll() is None:
                with suppress(OSError):  # the terminal may be closed
                    tell("Stopping the server.")
                _stop(process)


def _folder() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="raystream-demo-")
    except OSError as error:
        raise DemoError(f"{error.strerror}; set TMPDIR to a folder that can be written") from error


def _start(folder: Path) -> subprocess.Popen[bytes]:
    # The keys are for the user's own server.
    environment = _without(os.environ, ENVIRONMENT_VARIABLE)
    command = [sys.executable, "-P", "-m", "serve_app", "serve", str(folder / "serve_config.yaml")]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Neither modules nor models of the user's folder stand in for ours.
            cwd=folder,
            # Ctrl-C is for the demo, which then stops the server in order.
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + STOP_S + 10  # after STOP_S its supervisor kills what is left
    while process.poll() is None:
        try:
            process.send_signal(signal.SIGINT)
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except KeyboardInterrupt:
            continue  # a second request, which its supervisor gets, too
        except subprocess.TimeoutExpired:
            process.kill()


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
