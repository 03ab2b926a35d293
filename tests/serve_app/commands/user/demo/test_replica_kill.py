import os
import subprocess
from pathlib import Path

import pytest

from serve_app.commands.user.demo.replica_kill import kill_replica
from serve_app.commands.user.demo.server import DemoError, DemoServer


def test_only_processes_of_its_own_server_are_killed() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        server = DemoServer("http://127.0.0.1:1", process, Path("log"))
        with pytest.raises(DemoError, match="does not belong"):
            kill_replica(server, os.getpid())
        process.kill()
