"""The configuration is changed and deployed again while clients stream."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, read
from tests.faults.served.kinds import SEEDED, Body, about
from tests.faults.served.redeploy import Deployed
from tests.k8s.live.placement import ids_of, scaled
from tests.measured import Record

NUM_CLIENTS = 4
NAMES = ("os.path.join", "os.stat", "json.dumps")
BODIES: tuple[Body, ...] = tuple(
    about(name, max_tokens=200, **sampling) for name in NAMES for sampling in ({}, SEEDED)
)


class Load:
    """Clients that ask again and again; each answer is kept with the number of its question."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._client = client
        self._is_over = False

    async def _ask(self, start: int) -> None:
        for number in itertools.islice(itertools.cycle(range(len(BODIES))), start, None):
            self.answers.append((number, await read(self._client, BODIES[number])))
            if self._is_over:
                return

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Ask until the block ends; then wait for the last answers."""
        async with asyncio.TaskGroup() as clients:
            for start in range(NUM_CLIENTS):
                clients.create_task(self._ask(start))
            yield
            self._is_over = True

    def check(self, expected: list[Answer], record: Record) -> None:
        """Fail unless each answer is the undisturbed one."""
        answers = [answer for _, answer in self.answers]
        assert_equal(answers, [expected[number] for number, _ in self.answers])
        record("requests, all whole and equal", len(answers))
        record("streams moved", sum(bool(answer.lost_at) for answer in answers))
        record("longest pause, s", round(max(each.longest_gap_s for each in answers), 2))


async def undisturbed(client: httpx.AsyncClient) -> list[Answer]:
    return [await read(client, body) for body in BODIES]


async def test_what_changes_in_place_disturbs_no_stream(
    client: httpx.AsyncClient, deployed: Deployed, record: Record
) -> None:
    expected, before = await undisturbed(client), await ids_of(deployed)
    load = Load(client)
    async with load.running():
        section = deployed.section("pydoc-chat")
        section["user_config"] |= {"max_batch_size": 8, "max_queued_requests": 48}
        section["max_ongoing_requests"] = 500
        await scaled(deployed, "pydoc-chat", 2)
    after = await ids_of(deployed)
    load.check(expected, record)
    assert before["pydoc-chat"] < after["pydoc-chat"]
    assert len(after["pydoc-chat"]) == 2
    assert before["pydoc-detector"] == after["pydoc-detector"]
    assert before["Ingress"] <= after["Ingress"]
    assert not any(answer.lost_at for _, answer in load.answers)


@pytest.mark.soak  # replicas of two versions take turns; tests/faults/served has shorter ones
async def test_a_changed_argument_replaces_all_replicas_and_fails_no_request(
    client: httpx.AsyncClient, deployed: Deployed, record: Record
) -> None:
    expected, before = await undisturbed(client), await ids_of(deployed)
    load = Load(client)
    async with load.running():
        deployed.application["args"]["limits"]["max_num_stops"] = 8
        await deployed.apply()
        await deployed.settled()
    after = await ids_of(deployed)
    load.check(expected, record)
    for name, ids in after.items():
        assert not ids & before[name], name
