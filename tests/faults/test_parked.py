"""Streams of a low priority make room for better ones, and are what they were to be."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import httpx
import pytest

from deployments.contract.claims import Claim
from deployments.generator.admission import engine_run
from deployments.generator.admission.permit import Permit
from deployments.generator_replica import GeneratorReplica
from serve_app.backends.streams.parking import ParkedPlace, ParkingLot
from serve_app.config import AppConfig
from serve_app.http.request_record import RequestRecord, current_record
from serve_app.metrics import PARKED, IngressMetrics
from tests.deployments.local_handle import local_backend
from tests.faults.cut_replicas import Cuts, Router, client_of, two_replicas
from tests.faults.test_lost_at_each_token import CHAT, FOLDER, SEEDED, assert_equal, told
from tests.serve_app.sse_decoder import SseDecoder, events_of

NUM_LOW, NUM_HIGH = 10, 8
LIMITS: dict[str, Any] = {"max_model_len": 384, "max_num_seqs": 3, "prefix_caching": False}
LONG = {"max_tokens": 300}


@pytest.fixture(scope="module")
def replicas(cuts: Cuts) -> Iterator[list[GeneratorReplica]]:
    with two_replicas(FOLDER, cuts, **LIMITS) as made:
        yield made


async def ask(client: httpx.AsyncClient, **changes: Any) -> tuple[dict[str, Any], list[str]]:
    """Return what a stream tells, and its comments."""
    body = {**SEEDED, **changes, "stream": True, "stream_options": {"include_usage": True}}
    answer = await client.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    decoder = SseDecoder()
    decoder.feed(answer.content)
    return told(events_of(answer.content)), decoder.comments


@pytest.mark.slow
@pytest.mark.parametrize("park_after_s", [0, 0.05, 60], ids=["parked", "some parked", "displaced"])
async def test_low_streams_make_room_and_all_are_the_undisturbed_ones(
    client: httpx.AsyncClient,
    replicas: list[GeneratorReplica],
    monkeypatch: pytest.MonkeyPatch,
    park_after_s: float,
) -> None:
    monkeypatch.setattr(engine_run, "PARK_AFTER_S", park_after_s)
    seeds = range(NUM_LOW + NUM_HIGH)
    undisturbed = [(await ask(client, seed=seed))[0] for seed in seeds]
    num_resumed = sum(replica._engine.stats.num_resumed for replica in replicas)
    displaced = note_displaced(monkeypatch)

    lows = [asyncio.ensure_future(ask(client, seed=seed, priority=5)) for seed in seeds[:NUM_LOW]]
    highs = []
    for seed in seeds[NUM_LOW:]:
        await until_busy(replicas)
        highs.append(asyncio.ensure_future(ask(client, seed=seed, priority=0)))
        await asyncio.sleep(0)
    found = await asyncio.gather(*lows, *highs)

    for (told_now, _), expected in zip(found, undisturbed, strict=True):
        assert_equal(told_now, expected)
    comments = [comment for _, each in found for comment in each]
    assert not any("parked" in each for _, each in found[NUM_LOW:])
    assert ("parked" in comments) == (park_after_s < 1)
    assert "moved" not in comments
    assert displaced
    resumed = sum(replica._engine.stats.num_resumed for replica in replicas) - num_resumed
    assert (resumed > 0) == (park_after_s < 1), "who stays at a replica comes from no other"
    for replica in replicas:
        counted = replica._admission
        assert counted.num_running == counted.num_waiting == counted.num_outside == 0


async def until_busy(replicas: list[GeneratorReplica]) -> None:
    """Wait until no replica has room, or has nothing more to do."""
    async with asyncio.timeout(60):
        while any(each._admission.num_running < 3 for each in replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def note_displaced(monkeypatch: pytest.MonkeyPatch) -> list[Permit]:
    """Return a list that gets each sequence that gives up its place."""
    displaced = []
    note = Permit.note_displaced

    def noted(permit: Permit, now_s: float) -> None:
        displaced.append(permit)
        note(permit, now_s)

    monkeypatch.setattr(Permit, "note_displaced", noted)
    return displaced


@pytest.mark.slow
async def test_streams_are_equal_if_their_replica_is_replaced_while_many_are_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_run, "PARK_AFTER_S", 0)
    lots = note_lots(monkeypatch)
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    with two_replicas(FOLDER, Cuts(), **LIMITS) as (old, new):
        async with aclosing(local_backend(old)) as before, aclosing(local_backend(new)) as after:
            router = Router([before])
            async with client_of(router, config) as client:
                undisturbed = [(await ask(client, seed=seed, **LONG))[0] for seed in range(9)]
                lows = [
                    asyncio.ensure_future(ask(client, seed=seed, priority=5, **LONG))
                    for seed in range(6)
                ]
                await until_busy([old])
                highs = [
                    asyncio.ensure_future(ask(client, seed=seed, **LONG)) for seed in range(6, 9)
                ]
                await until_parked(lots, 3)
                assert not any(each.done() for each in (*lows, *highs))
                router.backends = [after]
                await asyncio.to_thread(old._engine.stop)
                found = await asyncio.gather(*lows, *highs)
        assert new._admission.num_running == new._admission.num_waiting == 0
    for (told_now, _), expected in zip(found, undisturbed, strict=True):
        assert_equal(told_now, expected)
    assert sum("parked" in comments for _, comments in found[:6]) >= 3
    assert all("moved" in comments for _, comments in found[6:])
    assert len(lots[0]) == 0


@pytest.mark.slow
async def test_a_parked_answer_that_is_not_streamed_only_takes_longer(
    client: httpx.AsyncClient, replicas: list[GeneratorReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_run, "PARK_AFTER_S", 0)
    whole = (await client.post(CHAT, json=SEEDED)).json()
    body = {**SEEDED, "priority": 3}
    lows = [asyncio.ensure_future(client.post(CHAT, json=body)) for _ in range(6)]
    await until_busy(replicas)
    highs = [asyncio.ensure_future(ask(client)) for _ in range(6)]
    for answer in await asyncio.gather(*lows):
        assert answer.json()["choices"] == whole["choices"]
        assert answer.json()["usage"] == whole["usage"]
    await asyncio.gather(*highs)


@pytest.mark.slow
async def test_a_client_that_leaves_a_parked_stream_frees_it(
    client: httpx.AsyncClient, replicas: list[GeneratorReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_run, "PARK_AFTER_S", 0)
    records: list[RequestRecord] = []
    lots = note_lots(monkeypatch, records)
    lows = [asyncio.ensure_future(ask(client, priority=5, **LONG)) for _ in range(6)]
    await until_busy(replicas)
    highs = [asyncio.ensure_future(ask(client, **LONG)) for _ in range(6)]
    await until_parked(lots, 1)
    assert num_parked(records[0]) == len(lots[0])
    assert not any(high.done() for high in highs), "parked streams still wait for these"
    for low in lows:
        low.cancel()
    await asyncio.gather(*lows, return_exceptions=True)
    assert len(lots[0]) == 0
    assert num_parked(records[0]) == 0
    assert not any(high.done() for high in highs)
    await asyncio.gather(*highs)
    async with asyncio.timeout(30):
        while any(each._admission.num_running for each in replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert all(each._admission.num_waiting == 0 for each in replicas)


def note_lots(
    monkeypatch: pytest.MonkeyPatch, records: list[RequestRecord] | None = None
) -> list[ParkingLot]:
    """Return a list that gets the lot of each stream that is parked; `records` gets its request."""
    lots: list[ParkingLot] = []
    enter = ParkingLot.enter

    def noted(lot: ParkingLot, claim: Claim) -> ParkedPlace | None:
        record = current_record()
        assert record is not None
        lots.append(lot)
        if records is not None:
            records.append(record)
        return enter(lot, claim)

    monkeypatch.setattr(ParkingLot, "enter", noted)
    return lots


async def until_parked(lots: list[ParkingLot], num_streams: int) -> None:
    """Wait until as many streams are parked at once."""
    async with asyncio.timeout(60):
        while not lots or len(lots[0]) < num_streams:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def num_parked(record: RequestRecord) -> float:
    """Return how many streams of a request's model the metrics call parked."""
    assert isinstance(record.meter, IngressMetrics)
    return record.meter.store.gauge(PARKED.name, record.model or "").value
