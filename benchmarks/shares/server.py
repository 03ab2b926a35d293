"""Serves a random model as `make serve` does, with keys."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import yaml

from benchmarks.peers.serve_model import configuration, environment, parsed
from benchmarks.serving.processes import started
from serve_app.commands.server_environment import HAPROXY_PORTS, free_ports

ROOT = Path(__file__).resolve().parent.parent.parent

MODEL = "random"
NUM_SLOTS = 8
"""Sequences that a replica runs at once."""

MAX_QUEUED_REQUESTS = 256
"""At each replica: more than the clients of a run, so that none is refused."""

KEYS = {"one": 1, "three": 3, "crowd": 1, "alone": 1, "batch": 1, "chat": 1}
"""The weight of each key."""


def secret_of(key: str) -> str:
    """Return the secret of a key of this benchmark's server."""
    return f"secret-of-the-key-{key}"


@contextmanager
def serving(
    folder: Path, out: Path, num_ingresses: int, num_replicas: int, max_stall_ms: int | None
) -> Iterator[int]:
    """Serve the model until the block ends; yield the port.

    Args:
        folder: Has the model's folder; the server's files are written there.
        out: A folder for the server's log.
        num_ingresses: How many ingresses run.
        num_replicas: How many replicas of the model run.
        max_stall_ms: Of the model's entry.
    """
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    keys = [
        {"name": name, "sha256": sha256(secret_of(name).encode()).hexdigest(), "weight": weight}
        for name, weight in KEYS.items()
    ]
    keys_file = folder / "keys.yaml"
    keys_file.write_text(yaml.safe_dump({"keys": keys}))
    arguments = ["--port", str(port), "--model", str(folder / MODEL), "--num-threads", "1"]
    arguments += ["--max-model-len", "1024", "--max-num-seqs", str(NUM_SLOTS)]
    arguments += ["--max-queued-requests", str(MAX_QUEUED_REQUESTS)]
    config = configuration(parsed(arguments))
    application = config["applications"][0]
    application["args"]["auth"]["api_keys_file"] = str(keys_file)
    application["args"]["jobs"] = {"folder": str(folder / "jobs")}
    application["args"]["models"][0] |= {"num_cpus": 0.4, "max_stall_ms": max_stall_ms}
    for section, number in zip(
        application["deployments"], (num_ingresses, num_replicas), strict=True
    ):
        section["autoscaling_config"] |= {"min_replicas": number, "max_replicas": number}
    file = folder / f"{num_ingresses}-{num_replicas}.yaml"
    file.write_text(yaml.safe_dump(config))
    serve = str(Path(sys.executable).with_name("serve"))
    with started(
        [serve, "run", "--address", "local", str(file)],
        f"http://127.0.0.1:{port}/ready",
        log=out / f"{num_ingresses}-{num_replicas}.log",
        cwd=ROOT,
        environment=environment() | dict(zip(HAPROXY_PORTS, map(str, others), strict=True)),
    ):
        yield port
