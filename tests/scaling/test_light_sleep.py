"""A model that sleeps lightly, served: its process and its answers stay, and pins keep it awake."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import yaml

from tests.faults.served.answer import assert_equal, read
from tests.faults.served.devices import shown
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, Replicas, is_alive, reached
from tests.faults.served.sizes import MODEL_SECTION
from tests.ray.serve_run import ROOT, Server

MODEL = f"/v1/models/{MODEL_SECTION}"
SEARCH = "pydoc-search"
EMBEDDED = {
    "model": SEARCH,
    "input": ["join two paths", "start a thread " * 20, "x"],
    "encoding_format": "base64",
}
AFTER_S = 0.5
BODY = about("os.path.join", 60, **SEEDED)


@pytest.fixture
async def lightly(
    client: httpx.AsyncClient, server: Server, deployed: Deployed
) -> AsyncIterator[None]:
    """Let the only replica sleep lightly as soon as it is not used; let no pin be left."""
    (chat,) = deployed.models
    chat["light_sleep_after_s"] = AFTER_S
    section = deployed.section(MODEL_SECTION)
    section["autoscaling_config"] |= {"min_replicas": 1, "max_replicas": 1}
    await deployed.apply()
    await deployed.settled()
    await reached(server.is_ready)
    yield
    await act(client, "unpin")


@pytest.fixture
async def by_itself(deployed: Deployed, replicas: Replicas) -> AsyncIterator[None]:
    """Say only that the model may be stopped, and that its process stays while there is memory."""
    (chat,) = deployed.models
    del chat["light_sleep_after_s"]
    chat["deep_sleep_after_s"] = None
    section = deployed.section(MODEL_SECTION)
    section["autoscaling_config"] |= {"min_replicas": 0, "max_replicas": 1}
    await deployed.apply()
    await deployed.settled()
    yield
    replicas.use_memory(0.0)


@pytest.fixture
async def deeply(deployed: Deployed) -> None:
    """Let the process end soon after it has fallen asleep; Serve itself would wait for an hour."""
    (chat,) = deployed.models
    chat |= {"light_sleep_after_s": AFTER_S, "deep_sleep_after_s": 2 * AFTER_S}
    section = deployed.section(MODEL_SECTION)
    section["autoscaling_config"] |= {
        "min_replicas": 0,
        "max_replicas": 1,
        "downscale_delay_s": 3600,
        "downscale_to_zero_delay_s": 3600,
    }
    await deployed.apply()
    await deployed.settled()


async def act(client: httpx.AsyncClient, action: str) -> None:
    answer = await client.post(f"{MODEL}/{action}")
    assert answer.is_success, answer.text


@pytest.fixture
async def searching(client: httpx.AsyncClient, server: Server, deployed: Deployed) -> None:
    """Serve a model that embeds and sleeps lightly as soon as it is not used, too."""
    shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"][0]
    (entry,) = (each for each in shipped["args"]["models"] if each["id"] == SEARCH)
    deployed.models.append(entry | {"light_sleep_after_s": AFTER_S})
    deployed.application["deployments"].append({"name": SEARCH, "num_replicas": 1})
    await deployed.apply()
    await deployed.settled()
    await reached(server.is_ready)


async def embeddings(client: httpx.AsyncClient) -> list[str]:
    """Return the vectors of some texts, to the last bit."""
    answer = await client.post("/v1/embeddings", json=EMBEDDED)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


async def light_sleep(client: httpx.AsyncClient, model_id: str = MODEL_SECTION) -> dict[str, Any]:
    """Return what `/v1/devices` shows of the sleep of a model's only replica."""
    (replica,) = (await shown(client, model_id)).replicas
    found: dict[str, Any] = replica["light_sleep"]
    return found


async def in_state(
    client: httpx.AsyncClient, state: str, num_sleeps: int, model_id: str = MODEL_SECTION
) -> dict[str, Any]:
    """Wait until the replica is in a state, and has fallen asleep at least as often."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = await light_sleep(client, model_id)
            if found["state"] == state and found["num_sleeps"] >= num_sleeps:
                return found
            await asyncio.sleep(0.05)


async def told_asleep(client: httpx.AsyncClient, model_id: str = MODEL_SECTION) -> None:
    """Wait until the list of models calls one asleep, as what operators see does."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            listed = (await client.get(f"/v1/models/{model_id}")).json()
            # While its last process ends, a model's own route may find nobody for a moment.
            if listed.get("state") == (await shown(client, model_id)).model["state"] == "asleep":
                return
            await asyncio.sleep(0.05)


@pytest.mark.usefixtures("lightly")
async def test_a_model_sleeps_lightly_and_wakes_in_the_same_process_and_a_pin_keeps_it_awake(
    client: httpx.AsyncClient, replicas: Replicas
) -> None:
    before = await read(client, BODY)
    (process,) = replicas.alive
    asleep = await in_state(client, "asleep", 1)
    await told_asleep(client)
    after = await read(client, BODY)
    assert after.is_whole
    assert_equal([after], [before])
    asleep = await in_state(client, "asleep", asleep["num_sleeps"] + 1)
    assert asleep["last_wake_s"] is not None

    await act(client, "wake")
    asleep = await in_state(client, "asleep", asleep["num_sleeps"] + 1)

    await act(client, "pin")
    pinned = await in_state(client, "awake", asleep["num_sleeps"])
    assert_equal([await read(client, BODY)], [before])
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 6 * AFTER_S
    while loop.time() < end_s:
        assert await light_sleep(client) == pinned
    await act(client, "unpin")
    await in_state(client, "asleep", pinned["num_sleeps"] + 1)
    assert replicas.alive == (await shown(client)).processes == [process]
    assert replicas.broken == []


@pytest.mark.usefixtures("searching")
async def test_a_model_that_embeds_sleeps_through_probes_and_wakes_for_requests(
    client: httpx.AsyncClient,
) -> None:
    before = await embeddings(client)
    processes = (await shown(client, SEARCH)).processes
    asleep = await in_state(client, "asleep", 1, SEARCH)
    await told_asleep(client, SEARCH)
    for path in ("/ready", "/health", "/v1/models", f"/v1/models/{SEARCH}", "/metrics"):
        assert (await client.get(path)).status_code == 200, path
    assert await light_sleep(client, SEARCH) == asleep

    after = await asyncio.gather(*(embeddings(client) for _ in range(8)))
    assert after == [before] * len(after)
    asleep = await in_state(client, "asleep", asleep["num_sleeps"] + 1, SEARCH)
    assert asleep["last_wake_s"] is not None
    assert (await client.post(f"/v1/models/{SEARCH}/wake")).is_success
    await in_state(client, "asleep", asleep["num_sleeps"] + 1, SEARCH)
    assert (await shown(client, SEARCH)).processes == processes


@pytest.mark.usefixtures("by_itself")
async def test_a_model_sleeps_lightly_by_itself_and_its_process_ends_once_memory_is_short(
    client: httpx.AsyncClient, replicas: Replicas
) -> None:
    before = await read(client, BODY)
    (process,) = replicas.alive
    asleep = await in_state(client, "asleep", 1)
    assert (asleep["ends_unix_s"], asleep["is_ending"]) == (None, False)
    await told_asleep(client)
    assert (await client.get("/ready")).status_code == 200
    assert_equal([await read(client, BODY)], [before])
    await in_state(client, "asleep", asleep["num_sleeps"] + 1)
    assert replicas.alive == (await shown(client)).processes == [process]

    replicas.use_memory(0.95)
    await reached(lambda: not is_alive(process))
    await told_asleep(client)
    assert_equal([await read(client, BODY)], [before])
    await reached(lambda: replicas.alive == [])
    assert replicas.broken == []


@pytest.mark.usefixtures("deeply")
async def test_a_process_that_has_slept_lightly_for_long_enough_ends(
    client: httpx.AsyncClient, replicas: Replicas
) -> None:
    before = await read(client, BODY)
    await reached(lambda: replicas.alive == [])
    await told_asleep(client)
    assert_equal([await read(client, BODY)], [before])
    await reached(lambda: replicas.alive == [])
    assert replicas.broken == []
