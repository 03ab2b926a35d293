"""Every kind of request, whose replica is killed while it streams: equal to the undisturbed run.

test_deaths.py is the short twin: it kills all kinds at once.
"""

import httpx
import pytest

from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.kinds import KINDS, SEEDED, Body, about, split_stop
from tests.faults.served.replicas import Replicas, kill

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
    client: httpx.AsyncClient, body: Body, num_tokens: int, replicas: Replicas
) -> Answer:
    """Read some tokens, kill the replica that generates them, and read the rest."""
    async with opened(client, body) as stream:
        await stream.read_tokens(num_tokens)
        victims = replicas.runs_of(stream.answer.request_id)
        kill(victims[-1])
        return await stream.read_to_end()


@pytest.mark.soak
@pytest.mark.parametrize("index", ALL_INDEXES)
@pytest.mark.parametrize("kind", [*KINDS, "stop"])
async def test_a_stream_lost_after_any_token_is_equal(
    client: httpx.AsyncClient, replicas: Replicas, kinds: dict[str, Body], kind: str, index: int
) -> None:
    expected = await read(client, kinds[kind])
    answer = await read_and_kill(client, kinds[kind], index, replicas)
    assert_equal([answer], [expected])
    assert len(replicas.runs_of(answer.request_id)) > kinds[kind].get("n", 1)
