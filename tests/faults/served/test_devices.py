"""`/v1/devices` under load, while a replica dies, and while one is silent."""

import os
import signal
from io import BytesIO
from typing import Any

import httpx
import psutil
from PIL import Image

from tests.faults.served.answer import assert_equal, read, slow_streams
from tests.faults.served.conftest import NUM_REPLICAS
from tests.faults.served.kinds import about
from tests.faults.served.replicas import Replicas, kill
from tests.measured import Record

BODIES = [about("os.path.join", max_tokens=200 + i) for i in range(8)]


async def chat_model(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return what `/v1/devices` shows of the only model."""
    answer = await client.get("/v1/devices")
    assert answer.status_code == 200, answer.text
    (model,) = answer.json()["data"]
    assert model["id"] == "pydoc-chat"
    found: dict[str, Any] = model
    return found


async def complete_model(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return the model once Serve tells of all replicas, some time after they have loaded."""
    model = await chat_model(client)
    while len(model["replicas"]) < NUM_REPLICAS:
        model = await chat_model(client)
    return model


def processes(model: dict[str, Any]) -> list[int]:
    return [replica["process_id"] for replica in model["replicas"]]


async def test_all_replicas_are_shown_under_load(
    client: httpx.AsyncClient, replicas: Replicas, record: Record
) -> None:
    model = await complete_model(client)
    async with slow_streams(client, BODIES, "seen") as streams:
        while sum(each["work"]["num_running"] for each in model["replicas"]) < len(BODIES):
            model = await chat_model(client)
        picture = await client.get("/v1/devices/history.png")
        for stream in streams:
            await stream.read_to_end()
    assert set(processes(model)) == set(replicas.alive)
    assert (model["state"], model["num_replicas"]) == ("running", {"RUNNING": NUM_REPLICAS})
    assert model["silent_replicas"] == []
    for replica in model["replicas"]:
        memory = replica["memory"]
        resident = psutil.Process(replica["process_id"]).memory_info().rss
        assert 0.5 * resident < memory["use"]["process_bytes"] < 2 * resident
        assert replica["plan"]["kv_bytes"] > 0
        assert replica["work"]["num_prompt_tokens"] > 0
        assert len(memory["history"]["unix_s"]) == len(memory["history"]["process_bytes"]) > 1
    assert (picture.status_code, picture.headers["content-type"]) == (200, "image/png")
    with Image.open(BytesIO(picture.content)) as image:
        record("size of the plot", image.size)


async def test_a_replica_that_dies_neither_fails_nor_stops_the_route(
    client: httpx.AsyncClient, replicas: Replicas
) -> None:
    expected = [await read(client, body) for body in BODIES]
    before = await complete_model(client)
    async with slow_streams(client, BODIES, "dying") as streams:
        (victim,) = replicas.runs_of(streams[0].answer.request_id)
        kill(victim)
        model = await chat_model(client)
        while len(set(processes(model)) - {victim}) < NUM_REPLICAS:
            model = await chat_model(client)
            picture = await client.get("/v1/devices/history.png")
            assert picture.status_code == 200
        answers = [await stream.read_to_end() for stream in streams]
    assert_equal(answers, expected)
    assert model["num_started"] == before["num_started"] + 1
    survivor, newcomer = sorted(model["replicas"], key=lambda each: each["ready_unix_s"])
    assert survivor["work"]["num_moved_in"] + newcomer["work"]["num_moved_in"] > 0


async def test_a_replica_that_is_silent_is_named_and_not_waited_for(
    client: httpx.AsyncClient, replicas: Replicas
) -> None:
    model = await complete_model(client)
    ids = {each["process_id"]: each["replica_id"] for each in model["replicas"]}
    stopped, other = replicas.alive
    os.kill(stopped, signal.SIGSTOP)
    try:
        model = await chat_model(client)
        while processes(model) != [other]:
            model = await chat_model(client)
        assert model["silent_replicas"] == [ids[stopped]]
    finally:
        os.kill(stopped, signal.SIGCONT)
