"""`make serve` with a model that can't be served: one line says why, and nothing is left."""

import os
from pathlib import Path

import pytest
import yaml

from benchmarks.free_port import free_port
from tests.ray.serve_run import READY_DEADLINE_S, ROOT, Server, haproxy_environment, wait_until

pytestmark = pytest.mark.slow

SERVE_S_ATTEMPTS = 3
LAST = "The application did not start: "


def test_a_start_that_fails_ends_with_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    """The checks before the start find nothing wrong: only a replica knows what its steps take."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    document["http_options"]["port"] = free_port()
    application = document["applications"][0]
    application["args"]["models"] = [model := application["args"]["models"][0]]
    names = ("Ingress", model["id"])
    application["deployments"] = [it for it in application["deployments"] if it["name"] in names]
    model["max_batched_tokens"] = 10**10  # a step takes some 60 TB
    model["max_queued_tokens"] = None
    path = tmp_path / "serve_config.yaml"
    path.write_text(yaml.safe_dump(document))
    environment = {**os.environ, "HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment |= {**haproxy_environment(), "CUDA_VISIBLE_DEVICES": ""}
    server = Server(path, tmp_path / "serve.log", environment)
    try:
        wait_until(lambda: server.has_ended(), READY_DEADLINE_S)
        assert server.process.returncode == 1
        screen = server.log.read_text()
        (told,) = [line for line in screen.splitlines() if line.startswith(LAST)]
        assert told.startswith(f"{LAST}pydoc-chat: ")
        assert "or lower max_model_len or max_batched_tokens" in told
        assert "Traceback" not in screen
        assert screen.count("can't start") < SERVE_S_ATTEMPTS
        assert not server.survivors()
    finally:
        server.kill()
