"""A server of models that take turns, with two ingresses; one of the models can't be loaded.

Once they end their processes after a turn, and once they keep them and sleep lightly. Where they
end, a small model has room beside the first one, and all others take turns with both. Where they
sleep, one more embeds texts.
"""

import asyncio
import copy
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from benchmarks.turns.server import ROOM_FOR_ONE
from tests.changing_server import ChangingServer
from tests.engines import shallow
from tests.faults.served.answer import Answer, read
from tests.faults.served.fragile_server import client_of
from tests.faults.served.replicas import Replicas, reached
from tests.faults.served.sizes import MODEL_SECTION
from tests.ray.serve_run import ROOT, Server
from tests.scaling.conftest import scaled_config
from tests.scaling.turns.models import BODIES, DAMAGED, FIRST, MODELS, SEARCH, SECOND, SMALL

WEIGHTS = "model.safetensors"

PARTS = {FIRST: 0.6, SECOND: 1.0, DAMAGED: 1.0, SMALL: 0.4}
"""What each model takes of the device, where processes end."""

Kind = Literal["ends", "light"]


def turns_config(folder: Path, kind: Kind) -> dict[str, Any]:
    """Return the scaling tests' configuration with models that take turns.

    Args:
        folder: Gets the folders of the models, which start faster with fewer layers.
        kind: Whether they end after a turn, or sleep lightly.
    """
    document = scaled_config()
    application = document["applications"][0]
    ingress, section = application["deployments"]
    ingress["num_replicas"] = 2
    section["autoscaling_config"] |= {
        "min_replicas": 0,
        "max_replicas": 1,
        "downscale_to_zero_delay_s": 600,  # a turn ends only for another model
    }
    (entry,) = application["args"]["models"]
    if kind == "light":
        entry["light_sleep_after_s"] = 600  # a turn ends only for another model
    names = MODELS if kind == "light" else tuple(PARTS)
    first = shallow(ROOT / "models" / MODEL_SECTION, folder)
    entry["source"] = str(first)
    for name in names[1:]:
        source = shutil.copytree(first, folder / name)
        application["deployments"].append(copy.deepcopy(section) | {"name": name})
        application["args"]["models"].append(
            copy.deepcopy(entry) | {"id": name, "source": str(source)}
        )
    group: Any = [*names]
    if kind == "light":
        shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"][0]
        (search,) = (each for each in shipped["args"]["models"] if each["id"] == SEARCH)
        application["args"]["models"].append(search)
        application["deployments"].append(copy.deepcopy(section) | {"name": SEARCH})
        group.append(SEARCH)
    else:
        group = PARTS
        for each in application["deployments"][1:]:
            # Serve's controller has a thousandth of this resource.
            room = {"node:__internal_head__": 0.9 * PARTS[each["name"]]}
            each["ray_actor_options"] = ROOM_FOR_ONE | {"resources": room}
    application["autoscaling_policy"] = {
        "policy_function": "deployments.turns:TurnPolicy",
        "policy_kwargs": {"groups": {"head": group}, "min_turn_s": 1}
        | ({"light": ["head"]} if kind == "light" else {}),
    }
    return document


@pytest.fixture(scope="package", params=["ends", "light"])
def server(
    request: pytest.FixtureRequest,
    changing_server: ChangingServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Server:
    """Serve these tests' file, and damage the third model once it is served."""
    folder = tmp_path_factory.mktemp("turns")
    server = changing_server.serve(turns_config(folder, request.param))
    (folder / DAMAGED / WEIGHTS).write_bytes(b"damaged")
    return server


@pytest.fixture(scope="package")
def undisturbed() -> list[Answer]:
    """Return the list that the first server fills: the first model is the same one at both."""
    return []


@pytest.fixture(scope="package")
def expected(
    changing_server: ChangingServer, server: Server, undisturbed: list[Answer]
) -> list[Answer]:
    """Return the answers of an undisturbed run, in the order of `BODIES`."""

    async def read_all() -> list[Answer]:
        async with client_of(server) as client:
            return list(await asyncio.gather(*(read(client, body) for body in BODIES)))

    undisturbed += [] if undisturbed else asyncio.run(read_all())
    return undisturbed


@pytest.fixture
async def replicas(changing_server: ChangingServer, server: Server) -> AsyncIterator[Replicas]:
    """Return what the models' replicas write; check afterwards what the test has left."""
    replicas = Replicas(changing_server.folder)
    yield replicas
    await reached(lambda: replicas.are_idle)
    assert replicas.broken == []
