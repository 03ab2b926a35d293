"""Replicas are killed while streams of all kinds run: clients see pauses, and nothing else.

`tests/faults/test_lost_at_each_token.py` loses replicas at every token, in process; the soaks here
and in test_kinds.py kill more of them.
"""

import asyncio
from collections.abc import Iterable
from uuid import uuid4

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, read, slow_streams
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.replicas import Replicas, is_alive, kill, reached
from tests.faults.served.sizes import MAX_NUM_SEQS, NUM_REPLICAS
from tests.faults.served.two_deaths import IN_HALVES, SLOW_READERS, TwoDeaths
from tests.measured import Record

NUM_STREAMS = 16
NAMES = ("os.path.join", "os.path.split", "os.stat", "os.walk")
BODIES = [
    about(NAMES[i % len(NAMES)], **SEEDED | {"seed": i}, logprobs=i % 2 == 0, max_tokens=300)
    for i in range(NUM_STREAMS)
]


def test_a_stream_of_every_kind_is_equal(deaths: TwoDeaths, record: Record) -> None:
    answers = deaths.answers
    assert_equal(list(answers.values()), [deaths.undisturbed[name] for name in answers])
    record("tokens received when lost", sorted(at for a in answers.values() for at in a.lost_at))
    record("longest pause, s", round(max(a.longest_gap_s for a in answers.values()), 2))


def test_every_stream_moved_and_those_of_the_first_victim_went_to_the_second(
    deaths: TwoDeaths,
) -> None:
    first, second = deaths.victims
    assert first != second
    assert not is_alive(first)
    assert not is_alive(second)
    streams = {name: each for name, each in deaths.answers.items() if name != IN_HALVES}
    assert [name for name, each in streams.items() if not each.lost_at] == []
    from_first = [
        runs for name, runs in deaths.runs.items() if runs[0] == first and name not in SLOW_READERS
    ]
    assert from_first
    assert all(second in runs for runs in from_first)
    unmoved = [name for name, runs in deaths.runs.items() if set(runs) <= {first, second}]
    assert unmoved == [], "another replica has ended each of them"


def test_streams_say_that_they_wait_when_no_replica_is_left(deaths: TwoDeaths) -> None:
    streams = {name: each for name, each in deaths.answers.items() if name != IN_HALVES}
    assert [name for name, each in streams.items() if "waiting" not in each.comments] == []


def test_an_answer_that_is_not_streamed_is_equal(deaths: TwoDeaths) -> None:
    undisturbed, disturbed = deaths.whole
    assert len(deaths.runs["whole"]) > 1
    assert disturbed["choices"] == undisturbed["choices"]
    num_tokens = [each["usage"]["completion_tokens"] for each in deaths.whole]
    assert num_tokens[0] == num_tokens[1]


@pytest.mark.soak  # in the fixture above they die one after the other
async def test_streams_are_equal_if_all_replicas_die_at_once(
    client: httpx.AsyncClient, replicas: Replicas, record: Record
) -> None:
    expected = list(await asyncio.gather(*(read(client, body) for body in BODIES)))
    async with slow_streams(client, BODIES, uuid4().hex) as streams:
        await streams[0].read_tokens(20)
        for victim in replicas.alive:
            kill(victim)
        answers = list(await asyncio.gather(*(stream.read_to_end() for stream in streams)))
    assert_equal(answers, expected)
    assert all(answer.lost_at and "waiting" in answer.comments for answer in answers)
    record("longest pause, s", round(max(answer.longest_gap_s for answer in answers), 2))


async def test_streams_are_equal_if_a_replica_dies_while_many_are_parked(
    client: httpx.AsyncClient, replicas: Replicas, record: Record
) -> None:
    await replicas.complete(NUM_REPLICAS)
    places = NUM_REPLICAS * MAX_NUM_SEQS
    # They last for ten seconds at least, so that they run until the better ones have come.
    lows = [about(NAMES[i % 4], **SEEDED | {"seed": i}, max_tokens=500) for i in range(places)]
    highs, name = lows[: places // 2], uuid4().hex
    expected = list(await asyncio.gather(*(read(client, body) for body in lows)))
    waiting = [body | {"priority": 5} for body in lows]
    async with slow_streams(client, waiting, f"{name}-low", "held") as streams:
        reading = [asyncio.ensure_future(stream.read_to_end()) for stream in streams]
        async with slow_streams(client, highs, f"{name}-high", "held") as better:
            reading += [asyncio.ensure_future(stream.read_to_end()) for stream in better]
            await reached(lambda: num_parked(stream.answer for stream in streams) >= places // 4)
            kill(replicas.alive[0])
            replicas.release(name)
            answers = list(await asyncio.gather(*reading))
    assert_equal(answers, [*expected, *expected[: places // 2]])
    assert any(answer.lost_at for answer in answers)
    assert num_parked(answers[places:]) == 0
    record("parked, of the low ones", num_parked(answers))
    record("longest pause, s", round(max(answer.longest_gap_s for answer in answers), 2))


def num_parked(answers: Iterable[Answer]) -> int:
    """Return how many answers were parked at least once."""
    return sum("parked" in answer.comments for answer in answers)
