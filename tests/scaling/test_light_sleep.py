"""Models that sleep lightly, served: their processes and answers stay, and pins keep them awake.

One file has them all: a deploy takes longer than any of these tests.
"""

import asyncio
import copy
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx
import pytest
import yaml

from tests.changing_server import ChangingServer
from tests.engines import shallow
from tests.faults.served.answer import Answer, assert_equal, read
from tests.faults.served.devices import Shown, shown
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import DEADLINE_S, Replicas, is_alive, reached
from tests.faults.served.sizes import MODEL_SECTION
from tests.ray.serve_run import ROOT, Server
from tests.scaling.conftest import scaled_config

MODEL = f"/v1/models/{MODEL_SECTION}"
SEARCH = "pydoc-search"
BY_ITSELF = "pydoc-by-itself"
DEEP = "pydoc-deep"
EMBEDDED = {
    "model": SEARCH,
    "input": ["join two paths", "start a thread " * 20, "x"],
    "encoding_format": "base64",
}
AFTER_S = 0.5
BODY = about("os.path.join", 60, **SEEDED)

STAYS = {"min_replicas": 1, "max_replicas": 1}
MAY_BE_STOPPED = {"min_replicas": 0, "max_replicas": 1}
NOT_BY_SERVE = {"downscale_delay_s": 3600, "downscale_to_zero_delay_s": 3600}

GENERATORS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    MODEL_SECTION: ({"light_sleep_after_s": AFTER_S}, STAYS),
    BY_ITSELF: ({"deep_sleep_after_s": None}, MAY_BE_STOPPED),
    DEEP: (
        {"light_sleep_after_s": AFTER_S, "deep_sleep_after_s": 2 * AFTER_S},
        MAY_BE_STOPPED | NOT_BY_SERVE,
    ),
}
"""Each model's keys in its entry, and in its `autoscaling_config`.

The first one sleeps as soon as it is not used. The second one may be stopped, and its process stays
while there is memory. The process of the third one ends soon after it has fallen asleep.
"""


@pytest.fixture(scope="module")
def server(
    changing_server: ChangingServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Serve three copies of the chat model, and one that embeds and sleeps lightly."""
    document = scaled_config()
    application = document["applications"][0]
    (entry,) = application["args"]["models"]
    ingress, section = application["deployments"]
    del entry["light_sleep_after_s"]
    entry["source"] = str(
        shallow(ROOT / "models" / MODEL_SECTION, tmp_path_factory.mktemp("light-sleep"))
    )
    shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text())["applications"][0]
    (search,) = (each for each in shipped["args"]["models"] if each["id"] == SEARCH)
    application["args"]["models"] = [search | {"light_sleep_after_s": AFTER_S}]
    application["deployments"] = [ingress, {"name": SEARCH, "num_replicas": 1}]
    for name, (keys, scaling) in GENERATORS.items():
        application["args"]["models"].append(entry | {"id": name, **keys})
        added = copy.deepcopy(section) | {"name": name}
        added["autoscaling_config"] |= scaling
        application["deployments"].append(added)
    with changing_server.serve_meanwhile(document) as server:
        yield server


@pytest.fixture
async def unpinned(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Let no pin be left."""
    yield
    await act(client, "unpin")


@pytest.fixture
def memory(replicas: Replicas) -> Iterator[None]:
    """Let no memory be in use in the end."""
    yield
    replicas.use_memory(0.0)


async def act(client: httpx.AsyncClient, action: str) -> None:
    answer = await client.post(f"{MODEL}/{action}")
    assert answer.is_success, answer.text


async def embeddings(client: httpx.AsyncClient) -> list[str]:
    """Return the vectors of some texts, to the last bit."""
    answer = await client.post("/v1/embeddings", json=EMBEDDED)
    assert answer.status_code == 200, answer.text
    return [each["embedding"] for each in answer.json()["data"]]


async def answered(client: httpx.AsyncClient, model_id: str = MODEL_SECTION) -> Shown:
    """Return what `/v1/devices` shows of a model once its replica answers in time."""
    async with asyncio.timeout(DEADLINE_S):
        while not (found := await shown(client, model_id)).replicas:
            pass  # each answer takes its time
    return found


async def light_sleep(client: httpx.AsyncClient, model_id: str = MODEL_SECTION) -> dict[str, Any]:
    """Return what `/v1/devices` shows of the sleep of a model's only replica."""
    (replica,) = (await answered(client, model_id)).replicas
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


@pytest.mark.usefixtures("unpinned")
async def test_a_model_sleeps_lightly_and_wakes_in_the_same_process_and_a_pin_keeps_it_awake(
    client: httpx.AsyncClient, replicas: Replicas
) -> None:
    before = await read(client, BODY)
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
    last = await read(client, BODY)
    assert_equal([last], [before])
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 6 * AFTER_S
    while loop.time() < end_s:
        assert await light_sleep(client) == pinned
    await act(client, "unpin")
    await in_state(client, "asleep", pinned["num_sleeps"] + 1)
    ran = {process_of(replicas, each) for each in (before, after, last)}
    assert {*(await answered(client)).processes} == ran
    assert len(ran) == 1
    assert replicas.broken == []


async def test_a_model_that_embeds_sleeps_through_probes_and_wakes_for_requests(
    client: httpx.AsyncClient,
) -> None:
    before = await embeddings(client)
    processes = (await answered(client, SEARCH)).processes
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
    assert (await answered(client, SEARCH)).processes == processes


@pytest.mark.usefixtures("memory")
async def test_a_model_sleeps_lightly_by_itself_and_its_process_ends_once_memory_is_short(
    client: httpx.AsyncClient, replicas: Replicas
) -> None:
    other = process_of(replicas, await read(client, BODY))
    body = BODY | {"model": BY_ITSELF}
    before = await read(client, body)
    process = process_of(replicas, before)
    asleep = await in_state(client, "asleep", 1, BY_ITSELF)
    assert (asleep["ends_unix_s"], asleep["is_ending"]) == (None, False)
    await told_asleep(client, BY_ITSELF)
    assert (await client.get("/ready")).status_code == 200
    assert_equal([await read(client, body)], [before])
    await in_state(client, "asleep", asleep["num_sleeps"] + 1, BY_ITSELF)
    assert (await answered(client, BY_ITSELF)).processes == [process]

    replicas.use_memory(0.95)
    await reached(lambda: not is_alive(process))
    await told_asleep(client, BY_ITSELF)
    after = await read(client, body)
    assert_equal([after], [before])
    await reached(lambda: not is_alive(process_of(replicas, after)))
    assert is_alive(other), "it may not be stopped"
    assert replicas.broken == []


async def test_a_process_that_has_slept_lightly_for_long_enough_ends(
    client: httpx.AsyncClient, replicas: Replicas
) -> None:
    answer = await read(client, BODY | {"model": DEEP})
    assert_equal([answer], [await read(client, BODY)])
    await reached(lambda: not is_alive(process_of(replicas, answer)))
    await told_asleep(client, DEEP)
    assert replicas.broken == []


def process_of(replicas: Replicas, answer: Answer) -> int:
    """Return the only process that an answer is from."""
    (process,) = replicas.runs_of(answer.request_id)
    return process
