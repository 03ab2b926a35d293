"""Delivered tokens are counted to the last one, whatever happens to their replicas."""

import asyncio

import httpx

from tests.changing_server import ChangingServer
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S
from tests.faults.served.scaled_down import ScaledDown
from tests.faults.served.sizes import MODEL_SECTION, NUM_REPLICAS
from tests.faults.served.totals import DELIVERED, MOVED, PROMPTS, totals
from tests.faults.served.tracing import request_of
from tests.faults.served.two_deaths import TRACES, TwoDeaths
from tests.measured import Record
from tests.otlp_receiver import Receiver


def test_tokens_of_killed_replicas_are_those_that_clients_have_counted(
    deaths: TwoDeaths, receiver: Receiver, record: Record
) -> None:
    usages = [answer.usage or {} for answer in deaths.answers.values()]
    usages.append(deaths.whole[1]["usage"])
    num_tokens = sum(usage["completion_tokens"] for usage in usages)
    assert deaths.after.gained(deaths.before, DELIVERED) == num_tokens
    num_prompt_tokens = sum(usage["prompt_tokens"] for usage in usages)
    assert deaths.after.gained(deaths.before, PROMPTS) == num_prompt_tokens
    # The client of a whole answer is told of no move, but its trace is.
    num_moved = request_of(receiver, TRACES["whole"]).attributes["raystream.request.moves"]
    num_moved += sum(len(answer.lost_at) for answer in deaths.answers.values())
    assert deaths.after.gained(deaths.before, MOVED, reason="lost") == num_moved
    assert deaths.after.gained(deaths.before, MOVED) == num_moved
    record("tokens that clients have counted, and the metrics", num_tokens)
    record("moves", num_moved)


def test_tokens_of_streams_that_leave_their_replicas_are_those_that_clients_have_counted(
    scaled_down: ScaledDown, record: Record
) -> None:
    answers = scaled_down.answers
    num_tokens = sum(answer.num_tokens for answer in answers)
    assert scaled_down.after.gained(scaled_down.before, DELIVERED) == num_tokens
    num_prompt_tokens = sum((answer.usage or {})["prompt_tokens"] for answer in answers)
    assert scaled_down.after.gained(scaled_down.before, PROMPTS) == num_prompt_tokens
    num_moved = sum(len(answer.lost_at) for answer in answers)
    assert num_moved
    assert scaled_down.after.gained(scaled_down.before, MOVED, reason="drained") == num_moved
    assert scaled_down.after.gained(scaled_down.before, MOVED) == num_moved
    record("tokens that clients have counted, and the metrics", num_tokens)


async def test_series_are_those_of_running_replicas(
    client: httpx.AsyncClient, deaths: TwoDeaths, changing_server: ChangingServer
) -> None:
    await asyncio.to_thread(changing_server.settle)
    running = await names_of_running(changing_server.deployed())
    assert len(running) == NUM_REPLICAS
    async with asyncio.timeout(DEADLINE_S):
        while (await totals(client)).replicas() != running:
            pass  # a text may be a moment old


async def names_of_running(deployed: Deployed) -> set[str]:
    """Return the names of the model's replicas that Serve routes to."""
    return {each["replica_id"] for each in (await deployed.running_replicas())[MODEL_SECTION]}
