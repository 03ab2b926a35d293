"""Every kind of request, whose replica is killed while it streams: equal to the undisturbed run."""

import asyncio

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.conftest import NUM_REPLICAS
from tests.faults.served.kinds import KINDS, SEEDED, Body, about, split_stop
from tests.faults.served.replicas import Replicas, is_alive, kill

ROUNDS = (
    {"greedy": 1, "json_schema": 2, "seeded": 3, "regex": 5, "several": 34},
    {"image": 8, "tools": 13, "logprobs": 21, "stop": 48, "penalties": 55, "min_tokens": 64},
)
"""After how many tokens the replica of each kind is killed; a round's requests run at once."""

ALL_INDEXES = (0, 1, 2, 4, 8, 16, 32, 64)


@pytest.fixture(scope="module")
def bodies() -> dict[str, Body]:
    """Return the bodies of all kinds that tests have needed so far."""
    return dict(KINDS)


@pytest.fixture
async def kinds(client: httpx.AsyncClient, bodies: dict[str, Body]) -> dict[str, Body]:
    """Return the bodies, with one whose stop string is split over two tokens."""
    if "stop" not in bodies:
        asked = about("os.path.join", **SEEDED, logprobs=True)
        whole = await read(client, asked)
        tokens = [token["token"] for token, *_ in _contents(whole)]
        bodies["stop"] = {**asked, "stop": [split_stop(tokens, 250)]}
    return bodies


def _contents(answer: Answer) -> list[tuple[dict[str, str], ...]]:
    return answer.choices[0].logprobs


async def read_and_kill(
    client: httpx.AsyncClient,
    body: Body,
    num_tokens: int,
    replicas: Replicas,
    others: asyncio.Barrier,
) -> Answer:
    """Read some tokens, kill the replica that generates them, and read the rest.

    It waits until the other streams have read theirs, too: one that loses two replicas before its
    first token is taken for the cause.
    """
    async with opened(client, body) as stream:
        await stream.read_tokens(num_tokens)
        await others.wait()
        victims = replicas.runs_of(stream.answer.request_id)
        # Another stream's death may have moved this one already.
        if len(victims) == body.get("n", 1) and is_alive(victims[-1]):
            kill(victims[-1])
        return await stream.read_to_end()


@pytest.mark.parametrize("indexes", ROUNDS, ids=" ".join)
async def test_streams_of_killed_replicas_are_equal(
    client: httpx.AsyncClient, replicas: Replicas, kinds: dict[str, Body], indexes: dict[str, int]
) -> None:
    undisturbed = [await read(client, kinds[kind]) for kind in indexes]
    others = asyncio.Barrier(len(indexes))
    answers = await asyncio.gather(
        *(read_and_kill(client, kinds[kind], at, replicas, others) for kind, at in indexes.items())
    )
    assert_equal(answers, undisturbed)
    for kind, answer in zip(indexes, answers, strict=True):
        num_choices = kinds[kind].get("n", 1)
        assert len(replicas.runs_of(answer.request_id)) > num_choices, f"{kind} was not moved"


@pytest.mark.soak
@pytest.mark.parametrize("index", ALL_INDEXES)
@pytest.mark.parametrize("kind", [*KINDS, "stop"])
async def test_a_stream_lost_after_any_token_is_equal(
    client: httpx.AsyncClient, replicas: Replicas, kinds: dict[str, Body], kind: str, index: int
) -> None:
    expected = await read(client, kinds[kind])
    answer = await read_and_kill(client, kinds[kind], index, replicas, asyncio.Barrier(1))
    assert_equal([answer], [expected])
    assert len(replicas.runs_of(answer.request_id)) > kinds[kind].get("n", 1)


async def test_a_stream_that_is_lost_again_while_it_resumes_is_equal(
    client: httpx.AsyncClient, replicas: Replicas, kinds: dict[str, Body]
) -> None:
    expected = await read(client, kinds["logprobs"])
    async with opened(client, kinds["logprobs"]) as stream:
        request_id = stream.answer.request_id
        await stream.read_tokens(20)
        first = replicas.runs_of(request_id)[-1]
        kill(first)
        await stream.read_comment("moved")
        second = replicas.runs_of(request_id)[-1]
        assert second != first
        kill(second)
        answer = await stream.read_to_end()
    assert_equal([answer], [expected])
    assert len(replicas.runs_of(request_id)) >= 3
    assert NUM_REPLICAS == 2, "both were killed"
