"""An operator puts a model to sleep, wakes it and pins it, whatever its load."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.faults.served.answer import slow_streams
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, is_alive, kill, reached
from tests.faults.served.sizes import MODEL_SECTION
from tests.scaling.conftest import TO_ZERO_DELAY_S

MODEL = f"/v1/models/{MODEL_SECTION}"
LONG = about("os.stat", 300, **SEEDED)
NEVER_S = 3600


@pytest.fixture
async def asleep_by_load(client: httpx.AsyncClient, deployed: Deployed) -> AsyncIterator[Deployed]:
    """Let the model sleep after an hour; in the end let no wish be left."""
    section = deployed.section(MODEL_SECTION)
    section["autoscaling_config"] |= {
        "min_replicas": 0,
        "max_replicas": 1,
        "downscale_delay_s": NEVER_S,
        "downscale_to_zero_delay_s": NEVER_S,
    }
    await deployed.apply()
    await deployed.settled()
    yield deployed
    await act(client, "unpin")


async def act(client: httpx.AsyncClient, action: str) -> dict[str, Any]:
    answer = await client.post(f"{MODEL}/{action}")
    assert answer.is_success, answer.text
    told: dict[str, Any] = answer.json()
    return told


async def test_a_model_sleeps_wakes_and_stays_awake_as_an_operator_wants(
    client: httpx.AsyncClient, asleep_by_load: Deployed, replicas: Replicas
) -> None:
    first = await one_alive(replicas)
    async with slow_streams(client, [LONG], "asked_to_sleep", "held") as (stream,):
        assert (await act(client, "sleep"))["going_to_sleep"]
        replicas.release("asked_to_sleep")
        await stream.read_to_end()
    assert stream.answer.is_whole
    assert stream.answer.comments == [], "it was not disturbed"
    await reached(lambda: not is_alive(first))

    assert (await act(client, "wake?wait=true"))["state"] == "running"
    woken = await one_alive(replicas)
    await act(client, "sleep")
    await reached(lambda: not is_alive(woken))

    assert (await act(client, "pin"))["pinned"]
    pinned = await one_alive(replicas)
    scaling = asleep_by_load.section(MODEL_SECTION)["autoscaling_config"]
    scaling |= {"downscale_delay_s": TO_ZERO_DELAY_S, "downscale_to_zero_delay_s": TO_ZERO_DELAY_S}
    await asleep_by_load.apply()
    await asleep_by_load.settled()
    kill(pinned)
    await reached(lambda: not is_alive(pinned))
    successor = await one_alive(replicas)
    (model,) = (await client.get("/v1/models")).json()["data"]
    assert model["pinned"], "also after a deploy"

    assert not (await act(client, "unpin"))["pinned"]
    await reached(lambda: not is_alive(successor))


async def one_alive(replicas: Replicas) -> int:
    """Wait until a replica has loaded the model; return its process."""
    await reached(lambda: bool(replicas.alive))
    (found,) = replicas.alive
    return found
