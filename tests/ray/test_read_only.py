"""`raystream serve` where nothing but shared memory can be written, and the user has no home.

A container that runs as a number on a read-only root has more: at least a `/tmp` of its own.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray.serve_run import (
    MAKE_SERVE,
    READY_DEADLINE_S,
    Server,
    haproxy_environment,
    shipped_config,
    wait_until,
)
from tests.ray.started import streamed_answer

pytestmark = pytest.mark.soak

READ_ONLY = """
for mounted in / /tmp /var/tmp "$HOME_OF_TESTS"; do
    if mountpoint --quiet "$mounted"; then mount -o remount,ro,bind "$mounted" || exit 77; fi
done
! touch "$HOME_OF_TESTS/file" /tmp/file 2>/dev/null || exit 78
exec "$@"
"""
"""Runs a program on a root that is read-only for it, in a mount namespace of its own."""

IN_A_NAMESPACE = ("/usr/bin/unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


def test_a_server_needs_only_a_folder_for_sockets_and_shared_memory(
    tmp_path: Path, shared_memory: Path
) -> None:
    environment = {**os.environ, "HOME": "/dev/null", "TMPDIR": str(shared_memory)}
    environment |= {**haproxy_environment(), "HOME_OF_TESTS": str(tmp_path)}
    command = (*IN_A_NAMESPACE, "sh", "-c", READ_ONLY, "sh", *MAKE_SERVE)
    server = Server(shipped_config(tmp_path), tmp_path / "serve.log", environment, command)
    try:
        wait_until(server.is_ready, READY_DEADLINE_S)
        assert streamed_answer(server.url).count("data: ") > 3
        assert "Traceback" not in server.log.read_text()
        assert (shared_memory / "ray").is_dir()
    finally:
        server.kill()
