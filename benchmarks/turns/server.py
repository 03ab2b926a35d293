"""Serves random models of 3 million parameters that take turns, as `make serve` serves a file."""

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from benchmarks.cpu_shapes import THREE_MILLION, save_shape
from benchmarks.peers.serve_model import configuration, environment, parsed
from benchmarks.serving.processes import started
from serve_app.commands.server_environment import HAPROXY_PORTS, free_ports

ROOT = Path(__file__).resolve().parent.parent.parent

LIMITS = ("--max-model-len", "4096", "--max-num-seqs", "32", "--num-threads", "1")

ROOM_FOR_ONE = {"num_cpus": 0.3, "resources": {"node:__internal_head__": 0.6}}
"""Each head of Ray has one of this resource, however many cores it has."""


NEVER_S = 10**6
"""Models of a light group sleep when their turn is over; none is to because it has no work."""


def turns_configuration(
    folder: Path, models: Sequence[str], min_turn_s: float, *, is_light: bool = False
) -> dict[str, Any]:
    """Return a configuration of models that take turns; their folders lie in another.

    Models of a light group have room beside each other, since each keeps its process.
    """
    port = free_ports(1)[0]
    arguments = ["--model", str(folder / models[0]), "--port", str(port), *LIMITS]
    config = configuration(parsed(arguments))
    application = config["applications"][0]
    (entry,), (ingress, section) = application["args"]["models"], application["deployments"]
    section["autoscaling_config"] |= {"min_replicas": 0, "max_replicas": 1}
    kwargs = {"groups": {"device": [*models]}, "min_turn_s": min_turn_s}
    if is_light:
        section.pop("ray_actor_options", None)
        entry["light_sleep_after_s"] = NEVER_S
        kwargs["light"] = ["device"]
    else:
        section["ray_actor_options"] = ROOM_FOR_ONE
    application["args"]["models"] = [
        copy.deepcopy(entry) | {"id": name, "source": str(folder / name)} for name in models
    ]
    application["deployments"] = [
        ingress,
        *(copy.deepcopy(section) | {"name": name} for name in models),
    ]
    application["autoscaling_policy"] = {
        "policy_function": "deployments.turns:TurnPolicy",
        "policy_kwargs": kwargs,
    }
    return config


@contextmanager
def serving(
    folder: Path, log: Path, models: Sequence[str], min_turn_s: float, *, is_light: bool = False
) -> Iterator[int]:
    """Serve new models until the block ends; yield the port.

    Args:
        folder: For the models and the configuration.
        log: The file for the server's output.
        models: Their ids.
        min_turn_s: See `deployments.turns.Turns`.
        is_light: Whether they keep their processes, and sleep lightly between their turns.
    """
    for name in models:
        save_shape(THREE_MILLION, folder / name)
    config = turns_configuration(folder, models, min_turn_s, is_light=is_light)
    port = config["http_options"]["port"]
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config))
    ports = dict(zip(HAPROXY_PORTS, map(str, free_ports(len(HAPROXY_PORTS))), strict=True))
    with started(
        [str(Path(sys.executable).with_name("serve")), "run", "--address", "local", str(file)],
        f"http://127.0.0.1:{port}/ready",
        log=log,
        cwd=ROOT,
        environment=environment() | ports,
    ):
        yield port
