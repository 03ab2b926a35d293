"""One mixed load while both replicas are killed, one after the other; many tests read what it left.

Every stream moves: those of the first victim go on at the second, which is then killed, too, and no
replica is left until Serve has started another.
"""

import asyncio
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
from psutil import Process

from tests.changing_server import ChangingServer
from tests.faults.served.answer import Answer, Stream, opened, read
from tests.faults.served.devices import Shown, shown
from tests.faults.served.fragile_server import client_of
from tests.faults.served.in_halves import CHAT, InHalves
from tests.faults.served.ingresses import Ingresses
from tests.faults.served.kinds import KINDS, SEEDED, Body, about, split_stop
from tests.faults.served.replicas import DEADLINE_S, Replicas, kill, reached
from tests.faults.served.totals import Mark, mark
from tests.faults.served.tracing import parent
from tests.ray.serve_run import Server

NUM_EARLY_TOKENS = 20
"""Of each choice when the first replica dies: one without any is a suspect from then on."""

LARGE = about("os.stat", **SEEDED, logprobs=True, top_logprobs=20)
WHOLE = about("os.walk", **SEEDED)
SLOW_READERS = ("slow reader 0", "slow reader 1")
IN_HALVES = "in halves"
"""The names of answers, besides those of `KINDS` and "stop"."""

TRACED = about("os.path.join", max_tokens=40, min_tokens=0, ignore_eos=True, stream=True)
TRACE = 1
"""A stream that nothing disturbs, and the number of its trace."""

TRACES = {name: 100 + number for number, name in enumerate((*KINDS, "stop", "whole"))}
"""The numbers of traces, by the name of the answer."""


@dataclass(frozen=True)
class TwoDeaths:
    """What the load and the deaths have left."""

    victims: tuple[int, int]  # the processes, in the order of their deaths
    undisturbed: Mapping[str, Answer]  # the answers to the same requests before, by name
    answers: Mapping[str, Answer]  # what the clients have got
    runs: Mapping[str, list[int]]  # the processes that each answer was asked of, in order
    # The answer that is not streamed, undisturbed and disturbed.
    whole: tuple[dict[str, Any], dict[str, Any]]
    before: Mark  # the totals of the metrics
    after: Mark  # the same, once the last client had its answer
    under_load: Shown  # what `/v1/devices` showed
    rss_bytes: Mapping[int, int]  # the resident memory of each process at that time
    replaced: Shown  # what it showed once two other replicas ran, with streams that had moved
    growth_bytes: int  # how much the ingress grew while the slow readers did not read
    num_more_fds: int  # how many more files it had open at the end


async def two_deaths(changing_server: ChangingServer) -> TwoDeaths:
    """Put the load on the server, kill its replicas, and wait until others have taken over."""
    await asyncio.to_thread(changing_server.settle)
    replicas = Replicas(changing_server.folder)
    await reached(lambda: replicas.are_idle)
    async with client_of(changing_server.server) as client:
        return await _Load(changing_server.server, client, replicas).run()


class _Load:
    def __init__(self, server: Server, client: httpx.AsyncClient, replicas: Replicas) -> None:
        self._port = server.port
        self._ingresses = Ingresses(server)
        self._client = client
        self._replicas = replicas
        self._name = uuid4().hex

    async def run(self) -> TwoDeaths:
        bodies = await self._bodies()
        undisturbed = await self._read_all(bodies)
        whole = (await self._client.post(CHAT, json=WHOLE)).json()
        await self._client.post(CHAT, json=TRACED, headers=parent(TRACE))
        before = await mark(self._client)
        size_bytes, num_fds = self._ingresses.rss_bytes(), self._ingresses.num_fds()
        small = bodies.pop(IN_HALVES)
        async with AsyncExitStack() as stack:
            asking = asyncio.create_task(self._ask_for_a_whole_answer())
            await reached(lambda: bool(self._runs("whole")))
            streams = {
                name: await stack.enter_async_context(self._opened(name, body))
                for name, body in bodies.items()
            }
            early = (self._begin(each, bodies[name], name) for name, each in streams.items())
            await asyncio.gather(*early)
            under_load = await self._shown_with(len(streams))
            rss_bytes = {pid: Process(pid).memory_info().rss for pid in under_load.processes}
            in_halves = await InHalves.begun(self._port, small)
            victims = await self._kill_both(streams, in_halves)
            self._replicas.release(self._name)
            reading = {
                name: asyncio.create_task(stream.read_to_end())
                for name, stream in streams.items()
                if name not in SLOW_READERS
            }
            replaced = await self._shown_without(set(victims))
            answers = {name: await task for name, task in reading.items()}
            answers[IN_HALVES] = await in_halves.answer()
            growth_bytes = self._ingresses.rss_bytes() - size_bytes
            answers |= {name: await streams[name].read_to_end() for name in SLOW_READERS}
            disturbed = (await asking).json()
        await reached(lambda: self._replicas.are_idle)
        return TwoDeaths(
            victims=victims,
            undisturbed=undisturbed,
            answers=answers,
            runs={name: self._runs(name) for name in (*streams, "whole")},
            whole=(whole, disturbed),
            before=before,
            after=await mark(self._client),
            under_load=under_load,
            rss_bytes=rss_bytes,
            replaced=replaced,
            growth_bytes=growth_bytes,
            num_more_fds=self._ingresses.num_fds() - num_fds,
        )

    async def _bodies(self) -> dict[str, Body]:
        """Return the requests, with one whose stop string is split over two tokens."""
        asked = about("os.path.join", **SEEDED, logprobs=True)
        logprobs = (await read(self._client, asked)).choices[0].logprobs
        stop = split_stop([token["token"] for token, *_ in logprobs], 250)
        return {
            **KINDS,
            "stop": {**asked, "stop": [stop]},
            **dict.fromkeys(SLOW_READERS, LARGE),
            IN_HALVES: about("time.time", **SEEDED, max_tokens=200),
        }

    async def _read_all(self, bodies: Mapping[str, Body]) -> dict[str, Answer]:
        answers = await asyncio.gather(*(read(self._client, body) for body in bodies.values()))
        return dict(zip(bodies, answers, strict=True))

    def _request_id(self, name: str) -> str:
        return f"held-{self._name}-{name.replace(' ', '-')}"

    def _runs(self, name: str) -> list[int]:
        return self._replicas.runs_of(self._request_id(name))

    def _opened(self, name: str, body: Body) -> AbstractAsyncContextManager[Stream]:
        headers = parent(TRACES[name]) if name in TRACES else {}
        return opened(self._client, body, request_id=self._request_id(name), headers=headers)

    async def _begin(self, stream: Stream, body: Body, name: str) -> None:
        """Read a stream's beginning; a slow reader reads no more than that."""
        num_tokens = 1 if name in SLOW_READERS else NUM_EARLY_TOKENS * body.get("n", 1)
        await stream.read_tokens(num_tokens)

    async def _ask_for_a_whole_answer(self) -> httpx.Response:
        headers = {"X-Request-Id": self._request_id("whole"), **parent(TRACES["whole"])}
        return await self._client.post(CHAT, json=WHOLE, headers=headers)

    async def _kill_both(
        self, streams: Mapping[str, Stream], in_halves: InHalves
    ) -> tuple[int, int]:
        """Kill the replica of a stream, and then the one that it goes on at."""
        stream = streams["greedy"]
        (first,) = self._runs("greedy")
        # What a slow reader has not read may keep its stream from moving.
        names = {*streams, "whole"} - {*SLOW_READERS}
        before = {name: self._runs(name) for name in names}
        kill(first)
        await reached(lambda: all(self._has_left(first, name, before[name]) for name in names))
        await in_halves.send_the_rest()
        await stream.read_comment("moved")
        await stream.read_tokens(stream.answer.lost_at[-1] + NUM_EARLY_TOKENS)
        second = self._runs("greedy")[-1]
        kill(second)
        return first, second

    def _has_left(self, replica: int, name: str, before: list[int]) -> bool:
        """Whether each choice that ran at a replica has been asked of another."""
        return len(self._runs(name)) >= len(before) + before.count(replica)

    async def _shown_with(self, num_running: int) -> Shown:
        """Return what `/v1/devices` shows once so many sequences run."""
        async with asyncio.timeout(DEADLINE_S):
            while (found := await shown(self._client)).total("num_running") < num_running:
                pass  # each answer takes its time
        return found

    async def _shown_without(self, dead: set[int]) -> Shown:
        """Ask until two others have taken streams over; the route must answer all the while."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                found = await shown(self._client)
                are_new = len(set(found.processes) - dead) == len(dead) == len(found.processes)
                if are_new and found.total("num_moved_in") > 0:
                    return found
