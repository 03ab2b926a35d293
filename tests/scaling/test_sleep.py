"""A model that nobody uses is stopped; questions leave it asleep, and requests wake it."""

import asyncio

import httpx
import pytest

from tests.faults.served.ingresses import Ingresses
from tests.faults.served.kinds import about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, Replicas, kill, reached
from tests.faults.served.sizes import MODEL_SECTION
from tests.measured import Record
from tests.ray.serve_run import Server
from tests.scaling.conftest import TO_ZERO_DELAY_S
from tests.scaling.load import Load

PROBES = ("/live", "/ready", "/health", "/v1/models", "/v1/models/pydoc-chat", "/v1/devices")
NUM_AT_ONCE = 50
CHAT = "/v1/chat/completions"
QUICK = about("os.stat", max_tokens=5)


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
    "probed_s", [2 * TO_ZERO_DELAY_S, pytest.param(60, marks=pytest.mark.soak)], ids=["6 s", "60 s"]
)
async def test_a_model_sleeps_through_probes_and_a_new_ingress_and_requests_wake_it(
    client: httpx.AsyncClient, server: Server, replicas: Replicas, record: Record, probed_s: float
) -> None:
    await replaced_ingress(server)
    record("probes", await probe(client, probed_s))
    wrong = await client.post(CHAT, json=QUICK | {"n": 1000})
    assert (wrong.status_code, replicas.alive) == (400, [])
    (model,) = (await client.get("/v1/devices")).json()["data"]
    assert (model["state"], model["replicas"], model["silent_replicas"]) == ("asleep", [], [])
    assert (model["status"], model["num_replicas"]) == ("HEALTHY", {})
    load = Load()
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.TaskGroup() as group:
        whole = group.create_task(client.post(CHAT, json=QUICK))
        for _ in range(NUM_AT_ONCE):
            group.create_task(load.ask(client))
        up_s = await reached(lambda: len(replicas.alive) >= 1)
    took_s = loop.time() - began_s
    assert whole.result().status_code == 200
    assert whole.result().json()["usage"]["completion_tokens"] == QUICK["max_tokens"]
    load.require_whole()
    for answer in load.answers:
        told = [each for each in answer.comments if each.startswith("loading pydoc-chat (")]
        assert told[0] == "loading pydoc-chat (0 s)"
        assert len(told) <= 2 + took_s / 2, "a comment comes every 2 s at most"
    record("seconds until the replica had loaded the model", round(up_s, 1))
    record("seconds until all had their answers", round(took_s, 1))
    record("comments of an answer", load.answers[0].comments)


async def replaced_ingress(server: Server) -> None:
    """Kill the only ingress, and wait until another answers."""
    ingresses = Ingresses(server)
    (killed,) = ingresses.processes()
    kill(killed)
    await reached(lambda: bool(set(ingresses.processes()) - {killed}))
    await reached(server.is_ready)
