"""Two hundred clients at once ask two replicas with 12 places each, behind two ingresses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from tests.prometheus import samples
from tests.ray.twins import DEADLINE_S, MODEL, NUM_PLACES, NUM_REPLICAS, Twins

NUM_CLIENTS, NUM_TOKENS = 200, 20
NUM_ANSWERS = 5
NUM_WHOLE = NUM_PLACES // NUM_ANSWERS
"""How many requests for several answers there is room for at most."""
NUM_SCRAPES = 4


@pytest.fixture
async def client(twins: Twins) -> AsyncIterator[httpx.AsyncClient]:
    """Open a client of replicas that hold their answers."""
    await twins.hold()
    async with twins.client() as client:
        yield client
    await twins.let_go()


def body(**fields: object) -> dict[str, object]:
    return {"prompt": "hi", "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}


async def wait_for(num_done: int, tasks: list[asyncio.Task[httpx.Response]]) -> None:
    """Wait until this many requests are answered."""
    while sum(task.done() for task in tasks) < num_done:
        await asyncio.wait([t for t in tasks if not t.done()], return_when=asyncio.FIRST_COMPLETED)


def is_refusal(answer: httpx.Response) -> bool:
    if answer.status_code != 503:
        return False
    assert answer.json()["error"]["code"] == "overloaded"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    return True


async def test_exactly_the_requests_beyond_the_limits_are_refused(
    client: httpx.AsyncClient, twins: Twins
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        asked = [
            asyncio.create_task(client.post("/text-generation", json=body(stream=i % 2 == 0)))
            for i in range(NUM_CLIENTS)
        ]
        await wait_for(NUM_CLIENTS - NUM_PLACES, asked)
        await twins.let_go()
        answers = await asyncio.gather(*asked)
    admitted = [answer for answer in answers if not is_refusal(answer)]
    assert len(admitted) == NUM_PLACES
    for answer in admitted:
        assert answer.status_code == 200
        if answer.headers["content-type"] == "text/event-stream; charset=utf-8":
            assert answer.text.endswith("data: [DONE]\n\n")
            assert f'"total_token_count":{NUM_TOKENS}' in answer.text.split("\n\n")[-3]
        else:
            assert answer.json()["token_count"] == NUM_TOKENS


async def test_a_request_for_several_answers_is_admitted_whole_or_not_at_all(
    client: httpx.AsyncClient, twins: Twins
) -> None:
    several = body(n=NUM_ANSWERS, messages=[{"role": "user", "content": "hi"}], model=MODEL)
    del several["prompt"]
    async with asyncio.timeout(DEADLINE_S):
        asked = [
            asyncio.create_task(client.post("/v1/chat/completions", json=several))
            for _ in range(3 * NUM_WHOLE)
        ]
        await wait_for(2 * NUM_WHOLE, asked)
        await twins.let_go()
        answers = await asyncio.gather(*asked)
    admitted = [answer for answer in answers if not is_refusal(answer)]
    assert 0 < len(admitted) <= NUM_WHOLE
    assert {len(answer.json()["choices"]) for answer in admitted} == {NUM_ANSWERS}


async def test_clients_that_leave_make_room_for_others_streamed_and_unstreamed(
    client: httpx.AsyncClient, twins: Twins
) -> None:
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        asked = [
            asyncio.create_task(client.post("/text-generation", json=body(stream=i % 2 == 0)))
            for i in range(NUM_PLACES + 1)
        ]
        await wait_for(1, asked)
        assert is_refusal(next(task.result() for task in asked if task.done()))
        late = []
        for kind in range(2):
            next(task for task in asked[kind::2] if not task.done()).cancel()
            while True:
                # A stream's headers come when it is accepted, even while its text is held.
                opening = client.stream("POST", "/text-generation", json=body())
                stream = await stack.enter_async_context(opening)
                if stream.status_code == 200:
                    late.append(stream)
                    break
                await stream.aclose()
        await twins.let_go()
        for stream in late:
            assert (await stream.aread()).endswith(b"data: [DONE]\n\n")
        await asyncio.gather(*asked, return_exceptions=True)


async def refusals_and_prompts(client: httpx.AsyncClient) -> tuple[list[float], list[float]]:
    """Return what one ingress shows: each ingress's refusals, and each replica's prompt tokens."""
    found = samples((await client.get("/metrics")).text)
    names = ("vllm:admission_rejections_total", "vllm:prompt_tokens_total")
    refusals, prompts = ([each for each in found if each.name == name] for name in names)
    by_ingress = {each.labels["replica"]: 0.0 for each in refusals}
    for each in refusals:
        by_ingress[each.labels["replica"]] += each.value
    return sorted(by_ingress.values()), [each.value for each in prompts]


async def test_a_request_that_a_full_replica_refuses_is_taken_by_another_and_counted_once(
    client: httpx.AsyncClient,
) -> None:
    refused_before = sum((await refusals_and_prompts(client))[0])
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack:
        statuses = []
        for _ in range(NUM_PLACES + 4):
            asked = client.stream("POST", "/text-generation", json=body())
            statuses.append((await stack.enter_async_context(asked)).status_code)
        assert (statuses.count(200), statuses.count(503)) == (NUM_PLACES, 4)

        # Either ingress may answer, and what it shows of the other is some seconds old.
        num_complete = 0
        while num_complete < NUM_SCRAPES:
            refusals, prompts = await refusals_and_prompts(client)
            is_complete = len(refusals) == 2 and len(prompts) == NUM_REPLICAS and 0 not in prompts
            is_complete = is_complete and sum(refusals) >= refused_before + 4
            num_complete = num_complete + 1 if is_complete else 0
        assert sum(refusals) == refused_before + 4
