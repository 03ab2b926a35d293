"""Several models on a node that says it has two GPUs: each replica gets its share of one."""

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.served.conftest import config
from tests.faults.served.kinds import about
from tests.faults.served.nodes import Cluster
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, is_alive, reached
from tests.faults.served.sizes import MODEL_SECTION
from tests.measured import Record
from tests.scaling.conftest import TO_ZERO_DELAY_S, shipped_scaling

NUM_GPUS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("gpus")
    (folder / "gpus").mkdir()
    cluster = Cluster(folder, num_gpus=NUM_GPUS)
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    url = f"http://127.0.0.1:{cluster.head.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE_S) as client:
        yield client


def placed(folder: Path) -> dict[str, set[str]]:
    """Return which models have a living replica on each GPU."""
    found: dict[str, set[str]] = {str(gpu): set() for gpu in range(NUM_GPUS)}
    for path in (folder / "gpus").iterdir():
        model, _, gpus = path.name.partition(" on ")
        text = path.read_text()
        if text and is_alive(int(text)):
            found[gpus].add(model)
    return found


async def deploy(
    cluster: Cluster, shares: Mapping[str, float], scaling: Mapping[str, Any]
) -> Deployed:
    """Deploy copies of the chat model with these shares of a GPU, by name."""
    document = config()
    document["http_options"]["port"] = cluster.head.http_port
    application = document["applications"][0]
    application["import_path"] = "tests.scaling.build_on_fake_gpus:build"
    application["args"]["auth"]["allow_unauthenticated_ray"] = True
    (chat,) = application["args"]["models"]
    ingress, section = application["deployments"]
    assert section["name"] == MODEL_SECTION
    del section["num_replicas"]
    application["args"]["models"] = [
        chat | {"id": name, "device": "cpu", "num_gpus": share, "num_cpus": 0.1}
        for name, share in shares.items()
    ]
    application["deployments"] = [ingress] + [
        copy.deepcopy(section) | {"name": name, "autoscaling_config": dict(scaling)}
        for name in shares
    ]
    deployed = Deployed(f"http://127.0.0.1:{cluster.dashboard_port}", document)
    await deployed.reachable(num_nodes=1)
    await deployed.apply()
    await deployed.settled()
    return deployed


async def ask(client: httpx.AsyncClient, model: str) -> None:
    body = about("os.stat", max_tokens=5) | {"model": model}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text


@pytest.mark.soak  # tests/ray/test_gpu_share.py is its short twin
async def test_two_halves_share_a_gpu_and_a_whole_one_has_its_own(
    cluster: Cluster, client: httpx.AsyncClient
) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 1}
    deployed = await deploy(cluster, {"half": 0.5, "other-half": 0.5, "whole": 1.0}, scaling)
    shared = [models for models in placed(cluster.folder).values() if "whole" not in models]
    assert shared == [{"half", "other-half"}]
    assert {"whole"} in placed(cluster.folder).values()
    await asyncio.gather(*(ask(client, each) for each in ("half", "other-half", "whole")))
    await deployed.remove()


@pytest.mark.soak
async def test_an_idle_model_gives_its_gpu_up_and_gets_one_back(
    cluster: Cluster, client: httpx.AsyncClient, record: Record
) -> None:
    scaling = shipped_scaling() | {
        "min_replicas": 0,
        "max_replicas": 1,
        "downscale_to_zero_delay_s": TO_ZERO_DELAY_S,
    }
    deployed = await deploy(cluster, dict.fromkeys(("a", "b", "c"), 1.0), scaling)
    assert (await client.get("/ready")).status_code == 200
    assert not any(placed(cluster.folder).values())
    loop = asyncio.get_running_loop()
    await asyncio.gather(ask(client, "a"), ask(client, "b"))
    asked_s = loop.time()
    await ask(client, "c")  # a or b sleeps first
    record("seconds until the third model had a GPU and answered", round(loop.time() - asked_s, 1))
    assert "c" in set.union(*placed(cluster.folder).values())
    await asyncio.gather(ask(client, "a"), ask(client, "b"), ask(client, "c"))
    await reached(lambda: not any(placed(cluster.folder).values()))
    await deployed.remove()
