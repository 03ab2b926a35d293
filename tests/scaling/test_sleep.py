"""A model that nobody uses is stopped; questions leave it asleep, and requests wake it."""

import asyncio

import httpx
import psutil
import pytest

from tests.faults.served.conftest import MODEL_SECTION, Memory
from tests.faults.served.kinds import about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, Replicas, reached
from tests.measured import Record
from tests.ray.serve_run import Server
from tests.scaling.conftest import TO_ZERO_DELAY_S
from tests.scaling.load import Load

PROBES = (
    "/live",
    "/ready",
    "/health",
    "/v1/models",
    "/v1/models/pydoc-chat",
    "/v1/devices",
    "/v1/devices/history.png",
)
NUM_AT_ONCE = 50


@pytest.fixture
async def asleep(client: httpx.AsyncClient, deployed: Deployed, replicas: Replicas) -> None:
    """Let the model sleep while nobody uses it, and wait until it does: probes don't matter."""
    await deployed.settled()
    deployed.section(MODEL_SECTION)["autoscaling_config"]["min_replicas"] = 0
    await deployed.apply()
    async with asyncio.timeout(DEADLINE_S):
        while replicas.alive:
            await probe(client, 0.2)
    await probe(client, TO_ZERO_DELAY_S)
    assert replicas.alive == []


async def probe(client: httpx.AsyncClient, seconds: float) -> int:
    """Send each probe five times a second; return their number."""
    loop = asyncio.get_running_loop()
    end_s, number = loop.time() + seconds, 0
    while loop.time() < end_s:
        for path in PROBES:
            answer = await client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            number += 1
        await asyncio.sleep(0.2)
    return number


@pytest.mark.usefixtures("asleep")
@pytest.mark.parametrize(
    "probed_s",
    [2 * TO_ZERO_DELAY_S, pytest.param(60, marks=pytest.mark.soak)],
    ids=["6 s", "60 s"],
)
async def test_probes_leave_a_model_asleep_and_fifty_clients_wake_it(
    client: httpx.AsyncClient, replicas: Replicas, record: Record, probed_s: float
) -> None:
    record("probes", await probe(client, probed_s))
    assert replicas.alive == []
    (model,) = (await client.get("/v1/devices")).json()["data"]
    assert (model["state"], model["replicas"], model["silent_replicas"]) == ("asleep", [], [])
    assert (model["status"], model["num_replicas"]) == ("HEALTHY", {})
    load = Load()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_AT_ONCE):
            group.create_task(load.ask(client))
        up_s = await reached(lambda: len(replicas.alive) >= 1)
    load.require_whole()
    for answer in load.answers:
        told = [each for each in answer.comments if each.startswith("loading pydoc-chat (")]
        assert told[0] == "loading pydoc-chat (0 s)"
        assert len(told) <= 2 + up_s / 2, "a comment comes every 2 s at most"
    record("seconds until the replica had loaded the model", round(up_s, 1))
    record("seconds until all had their answers", round(loop.time() - began_s, 1))
    record("comments of an answer", load.answers[0].comments)


@pytest.mark.usefixtures("asleep")
async def test_an_ingress_that_starts_leaves_a_model_asleep_and_a_whole_answer_wakes_it(
    client: httpx.AsyncClient, server: Server, replicas: Replicas
) -> None:
    memory = Memory(server)
    (ingress,) = memory.ingresses()
    psutil.Process(ingress).kill()
    await reached(lambda: bool(memory.ingresses()) and ingress not in memory.ingresses())
    await reached(server.is_ready)
    assert await probe(client, 2 * TO_ZERO_DELAY_S)
    assert replicas.alive == []
    body = about("os.stat", max_tokens=5)
    wrong = await client.post("/v1/chat/completions", json=body | {"n": 1000})
    assert (wrong.status_code, replicas.alive) == (400, [])
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 5
    await reached(lambda: replicas.alive == [])
