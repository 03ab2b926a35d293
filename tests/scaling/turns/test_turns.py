"""Models with room for one: they take turns, and what runs is parked, not lost, whatever dies.

The long twins are in `tests/benchmarks/test_turns.py`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest

from tests.faults.served.answer import Answer, Stream, assert_equal, opened, read, slow_streams
from tests.faults.served.devices import shown
from tests.faults.served.ingresses import Ingresses
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, Replicas, reached
from tests.measured import Record
from tests.ray.serve_run import Server
from tests.scaling.turns.models import (
    BODIES,
    DAMAGED,
    EMBEDDED,
    FIRST,
    SEARCH,
    SECOND,
    SMALL,
    quick,
)

REPLICA = "ray::ServeReplica:raystream:"
CONTROLLER = "ray::ServeController"


@dataclass(frozen=True)
class Swap:
    """Streams of the first model, which are to be parked because another one is asked."""

    streams: list[Stream]
    asking: asyncio.Task[Answer]

    @property
    def has_parked(self) -> bool:
        """Whether all streams are parked, or were."""
        return all("parked" in each.answer.comments for each in self.streams)


class Turns:
    """Lets the first model work, and asks another one meanwhile."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        server: Server,
        deployed: Deployed,
        replicas: Replicas,
        expected: list[Answer],
        record: Record,
    ) -> None:
        self.server = server
        self.deployed = deployed
        self.replicas = replicas
        self._client = client
        self._expected = expected
        self._record = record

    @asynccontextmanager
    async def swap_to(self, model: str, *, beside: str | None = None) -> AsyncIterator[Swap]:
        """Ask another model while streams of the first one run, which go on after the block.

        All have to be parked meanwhile. In the end they must be equal to an undisturbed run.

        Args:
            model: The other model.
            beside: A model that is asked before, and answers while the streams run.
        """
        name = uuid4().hex
        async with slow_streams(self._client, BODIES, name, "held") as streams:
            reading = [asyncio.ensure_future(each.read_to_end()) for each in streams]
            if beside is not None:
                assert (await read(self._client, quick(beside))).is_whole
                assert not any("parked" in each.answer.comments for each in streams)
            swap = Swap(streams, asyncio.create_task(read(self._client, quick(model))))
            yield swap
            assert swap.has_parked
            self.replicas.release(name)
            answers = await asyncio.gather(*reading)
        assert_equal(answers, self._expected)
        self._record("longest pause, s", round(max(each.longest_gap_s for each in answers), 1))

    @asynccontextmanager
    async def waiting(self, model: str, *, other: str) -> AsyncIterator[None]:
        """Ask a model while another one keeps its turn until the end of the block."""
        async with self._pinned(other), opened(self._client, quick(model)) as stream:
            reading = asyncio.ensure_future(stream.read_to_end())
            await reached(lambda: was_told_to_wait(stream.answer, model))
            yield
            assert not reading.done()
            await self._act(other, "unpin")
            assert (await reading).is_whole

    @asynccontextmanager
    async def _pinned(self, model: str) -> AsyncIterator[None]:
        """Let a model keep its turn in the block."""
        await self._act(model, "pin")
        try:
            assert (await read(self._client, quick(model))).is_whole
            yield
        finally:
            await self._act(model, "unpin")

    async def embed(self) -> list[str]:
        """Return the vectors of some texts, to the last bit."""
        answer = await self._client.post("/v1/embeddings", json=EMBEDDED)
        assert answer.status_code == 200, answer.text
        return [each["embedding"] for each in answer.json()["data"]]

    @asynccontextmanager
    async def embedding(
        self, number: int, *, other: str
    ) -> AsyncIterator[list[asyncio.Task[list[str]]]]:
        """Have texts embedded while another model keeps its turn until the end of the block."""
        async with self._pinned(other):
            asking = [asyncio.create_task(self.embed()) for _ in range(number)]
            async with asyncio.timeout(DEADLINE_S):
                while (await shown(self._client, SEARCH)).total("num_waiting") < number:  # noqa: ASYNC110 - another process's state
                    await asyncio.sleep(0.05)
            yield asking
            assert not any(each.done() for each in asking)
        await asyncio.wait(asking)

    async def ask(self, model: str) -> Answer:
        """Ask a model when no other one works, which gives it the turn."""
        return await read(self._client, quick(model))

    async def _act(self, model: str, action: str) -> None:
        answer = await self._client.post(f"/v1/models/{model}/{action}")
        assert answer.is_success, answer.text

    async def ended(self, model: str) -> None:
        """Wait until Serve wants no replica of a model, or its replica sleeps lightly."""
        async with asyncio.timeout(DEADLINE_S):
            while await self._has_turn(model):  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.05)

    async def _has_turn(self, model: str) -> bool:
        found = (await self.deployed.details())["deployments"][model]
        is_wanted = bool(found["target_num_replicas"])
        sleeps = await self.sleeps()
        return is_wanted and not (model in sleeps and sleeps[model]["state"] == "asleep")

    async def sleeps(self) -> dict[str, dict[str, Any]]:
        """Return what `/v1/devices` shows of the light sleep of each replica that answers."""
        shown = (await self._client.get("/v1/devices")).json()["data"]
        return {
            each["id"]: replica["light_sleep"]
            for each in shown
            for replica in each["replicas"]
            if replica["light_sleep"] is not None
        }

    async def sleeps_of(self, *models: str) -> list[dict[str, Any]]:
        """Return the same of some models, once a replica of each answers in time."""
        async with asyncio.timeout(DEADLINE_S):
            while not set(models) <= (found := await self.sleeps()).keys():
                pass  # each answer takes its time
        return [found[each] for each in models]

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the server's processes with a title."""
        return self.server.processes(title)

    async def started(self, title: str) -> psutil.Process:
        """Wait for the only process with a title."""
        await reached(lambda: len(self.processes(title)) == 1)
        return self.processes(title)[0]


@pytest.fixture
def turns(
    client: httpx.AsyncClient,
    server: Server,
    deployed: Deployed,
    replicas: Replicas,
    expected: list[Answer],
    record: Record,
) -> Turns:
    return Turns(client, server, deployed, replicas, expected, record)


def was_told_to_wait(answer: Answer, model: str) -> bool:
    return any(each.startswith(f"loading {model} (") for each in answer.comments)


@pytest.mark.parametrize("server", ["ends"], indirect=True)
async def test_models_run_at_once_where_they_fit_and_make_room_for_a_large_one_whatever_is_deployed(
    turns: Turns, server: Server
) -> None:
    assert len(Ingresses(server).processes()) == 2, "streams are parked at both"
    async with turns.swap_to(SECOND, beside=SMALL) as swap:
        assert len(turns.processes(f"{REPLICA}{SMALL}")) == 1
        await reached(lambda: swap.has_parked)
        await turns.deployed.apply()  # the same file changes nothing
        second = await swap.asking
        assert second.is_whole, "it was loaded, with the whole device"
        assert was_told_to_wait(second, SECOND)
    assert not any(each.answer.lost_at for each in swap.streams), "nothing was lost"


@pytest.mark.parametrize("server", ["light"], indirect=True)
async def test_models_that_sleep_lightly_keep_their_processes_and_never_hold_memory_at_once(
    turns: Turns,
) -> None:
    async with turns.swap_to(SECOND) as swap:
        second = await swap.asking
        assert second.is_whole
        assert was_told_to_wait(second, SECOND)
    assert not any(each.answer.lost_at for each in swap.streams), "nothing was lost"
    titles = [f"{REPLICA}{name}" for name in (FIRST, SECOND)]
    before = [(await turns.started(each)).pid for each in titles]
    async with turns.swap_to(SECOND) as swap:
        await reached(lambda: swap.has_parked)
        await turns.deployed.apply()  # the same file changes nothing
        second = await swap.asking
        assert second.is_whole
        first_sleep, second_sleep = await turns.sleeps_of(FIRST, SECOND)
        if second_sleep["state"] == "awake" == first_sleep["state"]:
            # The first was asked later, when the turn was over.
            assert first_sleep["state_unix_s"] > second_sleep["state_unix_s"]
    assert [(await turns.started(each)).pid for each in titles] == before
    assert not any(each.answer.lost_at for each in swap.streams), "nothing was lost"


async def test_a_replica_killed_when_its_turn_ends_and_one_killed_while_it_loads_lose_no_stream(
    turns: Turns,
) -> None:
    async with turns.swap_to(SECOND) as swap:
        (first,) = turns.processes(f"{REPLICA}{FIRST}")
        await turns.ended(FIRST)
        with suppress(psutil.NoSuchProcess):  # it had nothing left to do
            first.kill()
        (await turns.started(f"{REPLICA}{SECOND}")).kill()
        assert (await swap.asking).is_whole, "it was loaded again in the same turn"


async def test_a_controller_that_is_killed_during_a_swap_is_followed_by_one_that_ends_it(
    turns: Turns,
) -> None:
    async with turns.swap_to(SECOND) as swap:
        await reached(lambda: swap.has_parked)
        killed = await turns.started(CONTROLLER)
        killed.kill()
        assert (await swap.asking).is_whole
        assert (await turns.started(CONTROLLER)).pid != killed.pid


async def test_a_model_that_can_not_be_loaded_gives_the_turn_back_to_one_that_was_killed_meanwhile(
    turns: Turns,
) -> None:
    async with turns.swap_to(DAMAGED) as swap:
        (first,) = turns.processes(f"{REPLICA}{FIRST}")
        await reached(lambda: any("parked" in each.answer.comments for each in swap.streams))
        with suppress(psutil.NoSuchProcess):
            first.kill()
        failed = await swap.asking
        assert was_told_to_wait(failed, DAMAGED)
        assert failed.error is not None
        assert DAMAGED in failed.error["message"]


@pytest.mark.parametrize("server", ["light"], indirect=True)
async def test_a_replica_that_dies_in_the_turn_of_another_model_does_not_hold_up_what_waits_for_it(
    turns: Turns,
) -> None:
    assert (await turns.ask(SECOND)).is_whole
    async with turns.waiting(SECOND, other=FIRST):
        (second,) = turns.processes(f"{REPLICA}{SECOND}")
        second.kill()
        await reached(lambda: not second.is_running())


@pytest.mark.parametrize("server", ["light"], indirect=True)
async def test_calls_that_wait_for_a_turn_do_not_hold_up_the_stop_of_their_replica(
    turns: Turns,
) -> None:
    section = turns.deployed.section(SECOND)
    section["graceful_shutdown_timeout_s"] = 2 * DEADLINE_S
    await turns.deployed.apply()
    await turns.deployed.settled()
    assert (await turns.ask(SECOND)).is_whole
    async with turns.waiting(SECOND, other=FIRST):
        (second,) = turns.processes(f"{REPLICA}{SECOND}")
        section["ray_actor_options"] = {"num_cpus": 0.05}
        await turns.deployed.apply()
        await reached(lambda: not second.is_running())


@pytest.mark.parametrize("server", ["light"], indirect=True)
async def test_texts_are_embedded_in_their_model_s_turns_though_its_sleeping_replica_is_killed(
    turns: Turns,
) -> None:
    expected = await turns.embed()
    for _ in range(2):
        assert (await turns.ask(FIRST)).is_whole
        assert await turns.embed() == expected
    async with turns.embedding(4, other=FIRST) as asking:
        before = await turns.started(f"{REPLICA}{SEARCH}")
    assert [each.result() for each in asking] == [expected] * 4
    assert (await turns.started(f"{REPLICA}{SEARCH}")).pid == before.pid, "it has slept"
    async with turns.embedding(4, other=FIRST) as asking:
        before.kill()
        await reached(lambda: not before.is_running())
    assert [each.result() for each in asking] == [expected] * 4
    assert (await turns.started(f"{REPLICA}{SEARCH}")).pid != before.pid
