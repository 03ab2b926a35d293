"""Two models with room for one: they take turns, and what runs is parked, not lost."""

import asyncio
import copy
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.faults.served.answer import Answer, Stream, assert_equal, read, slow_streams
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, Replicas, kill, reached
from tests.faults.served.sizes import DETECTOR, MODEL_SECTION
from tests.measured import Record
from tests.ray.serve_run import ROOT

SECOND = DETECTOR
"""Here it generates. Serve gives it up at its first failed start (`tests.faults.served.build`)."""

NUM_TOKENS = 800
NAMES = ("os.path.join", "os.path.split", "os.stat", "os.walk")
BODIES = [about(name, NUM_TOKENS, **SEEDED | {"seed": i}) for i, name in enumerate(NAMES)]
QUICK = about("os.stat", max_tokens=5) | {"model": SECOND}

ROOM_FOR_ONE = {"num_cpus": 0.3, "resources": {"node:__internal_head__": 0.6}}
"""Each head of Ray has one of this resource, however many cores it has."""

WEIGHTS = "model.safetensors"


@pytest.fixture
def second_source(tmp_path: Path) -> Path:
    """Return a folder with the second model, which a test may damage."""
    return Path(shutil.copytree(ROOT / "models" / "pydoc-chat", tmp_path / "second"))


@pytest.fixture
async def turns(
    deployed: Deployed, replicas: Replicas, second_source: Path
) -> AsyncIterator[Deployed]:
    """Serve two models that take turns; none has work before the first request."""
    application = deployed.application
    section = deployed.section(MODEL_SECTION)
    section["autoscaling_config"] |= {"min_replicas": 0, "max_replicas": 1}
    section["ray_actor_options"] = ROOM_FOR_ONE
    application["deployments"].append(copy.deepcopy(section) | {"name": SECOND})
    entry = {"id": SECOND, "source": str(second_source)}
    deployed.models.append(copy.deepcopy(deployed.models[0]) | entry)
    application["autoscaling_policy"] = {
        "policy_function": "deployments.turns:TurnPolicy",
        "policy_kwargs": {"groups": {"head": [MODEL_SECTION, SECOND]}, "min_turn_s": 1},
    }
    await deployed.apply()
    await deployed.settled()
    yield deployed
    assert replicas.broken == []


@asynccontextmanager
async def parked_streams(
    client: httpx.AsyncClient, replicas: Replicas, record: Record, name: str
) -> AsyncIterator[list[Stream]]:
    """Run streams of the first model, which the block lets be parked; they go on after it.

    In the end all must be equal to an undisturbed run.
    """
    expected = list(await asyncio.gather(*(read(client, body) for body in BODIES)))
    async with slow_streams(client, BODIES, name, "held") as streams:
        reading = [asyncio.ensure_future(each.read_to_end()) for each in streams]
        yield streams
        assert all("parked" in each.answer.comments for each in streams)
        replicas.release(name)
        answers = await asyncio.gather(*reading)
    assert_equal(answers, expected)
    record("longest pause, s", round(max(each.longest_gap_s for each in answers), 1))


async def num_wanted(deployed: Deployed) -> int:
    """Return how many replicas Serve wants of the first model."""
    found = (await deployed.details())["deployments"][MODEL_SECTION]
    return int(found["target_num_replicas"])


def was_told_to_wait(answer: Answer) -> bool:
    return any(each.startswith(f"loading {SECOND} (") for each in answer.comments)


async def test_a_model_that_is_asked_for_gets_its_turn_and_streams_of_the_other_go_on_after_it(
    client: httpx.AsyncClient, turns: Deployed, replicas: Replicas, record: Record
) -> None:
    async with parked_streams(client, replicas, record, "swapped") as streams:
        (first,) = replicas.alive
        second = await read(client, QUICK)
        assert second.is_whole
        assert was_told_to_wait(second)
        await reached(lambda: first not in replicas.alive)
    assert not any(each.answer.lost_at for each in streams), "nothing was lost"


async def test_a_replica_that_is_killed_when_its_turn_ends_loses_no_stream(
    client: httpx.AsyncClient, turns: Deployed, replicas: Replicas, record: Record
) -> None:
    async with parked_streams(client, replicas, record, "killed"):
        (first,) = replicas.alive
        asking = asyncio.create_task(read(client, QUICK))
        async with asyncio.timeout(DEADLINE_S):
            while await num_wanted(turns):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)
        with suppress(ProcessLookupError):  # it had nothing left to do
            kill(first)
        assert (await asking).is_whole


async def test_a_model_that_can_not_be_loaded_gives_the_turn_back(
    client: httpx.AsyncClient,
    turns: Deployed,
    replicas: Replicas,
    record: Record,
    second_source: Path,
) -> None:
    (second_source / WEIGHTS).write_bytes(b"damaged")
    async with parked_streams(client, replicas, record, "failed"):
        second = await read(client, QUICK)
        assert was_told_to_wait(second)
        assert second.error is not None
        assert SECOND in second.error["message"]
