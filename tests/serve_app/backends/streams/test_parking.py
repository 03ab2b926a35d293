"""Parked streams: their order, their bound, and how they go on."""

import asyncio
from collections.abc import Sequence

import pytest

from deployments.contract.claims import Claim, FairShares
from deployments.contract.errors import (
    GenerationAbortedError,
    ModelChangedError,
    OverloadedError,
    OverloadReason,
    ReplicaUnavailableError,
    StallTimeoutError,
    TotalTimeoutError,
)
from deployments.contract.generation import (
    PROBATION_TOKENS_AGAIN,
    GenerationRequest,
    GenerationStream,
)
from deployments.contract.sampling_params import SamplingParams
from serve_app.backends.replicas.replica_departures import Departure
from serve_app.backends.replicas.replica_errors import ParkedError
from serve_app.backends.streams.deadlines import Deadlines
from serve_app.backends.streams.failover import Failover
from serve_app.backends.streams.parking import OFFER_INTERVAL_S, ParkedPlace, ParkingLot
from serve_app.backends.streams.retries import FailoverLimits
from serve_app.config import LimitsConfig
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from serve_app.http.stream_notices import Notice
from tests.serve_app.backends.fake_replicas import Fate, Replicas
from tests.stopped_clock import Clock, settle

pytestmark = pytest.mark.in_time

PARKED = ParkedError("parked")
OTHER = ModelChangedError("another version")
REQUEST = GenerationRequest("r", "hi", SamplingParams(max_tokens=6))


def lot_of(max_parked: int = 8, shares: FairShares | None = None) -> ParkingLot:
    return ParkingLot(max_parked, 60, shares, interval_s=0)


def entered(lot: ParkingLot, priority: int = 0, tenant: str = "") -> ParkedPlace:
    place = lot.enter(Claim(priority, tenant))
    assert place is not None
    return place


def has_turn(place: ParkedPlace) -> bool:
    return place._turn.is_set()


async def test_one_stream_is_offered_at_a_time_in_the_order_of_priority_and_arrival() -> None:
    lot = lot_of()
    first, low, second, best = (entered(lot, priority) for priority in (0, 1, 0, -1))
    order = []
    while len(lot):
        offered = [each for each in (first, low, second, best) if has_turn(each)]
        [place] = [each for each in offered if each not in order]
        order.append(place)
        place.leave()
        place.leave()
    assert order == [first, best, second, low]


async def test_within_a_priority_the_tenant_that_got_least_is_offered_first() -> None:
    shares = FairShares()
    lot = lot_of(shares=shares)
    blocking = entered(lot)
    much, better, little = entered(lot, 0, "a"), entered(lot, -1, "a"), entered(lot, 0, "b")
    shares.charge(much.claim, 100)
    blocking.leave()
    assert has_turn(better)
    better.leave()
    assert has_turn(little)
    shares.charge(little.claim, 200)
    little.end_turn()
    await asyncio.wait_for(much.wait_for_turn(), 5)
    assert not has_turn(little)


async def test_a_tenant_that_is_parked_waits_for_its_share() -> None:
    shares = FairShares()
    place = entered(lot_of(shares=shares), 0, "a")
    shares.charge(place.claim, 100)
    shares.enter(Claim(tenant="b"))
    assert shares.counter("b") == 100, "it begins to wait beside the parked one"
    place.leave()
    place.leave()
    assert [each.num_waiting for each in shares.of_tenants(2)] == [1, 0]


async def test_one_that_was_given_back_waits_again_at_its_place() -> None:
    lot = lot_of()
    first, second = entered(lot), entered(lot)
    better = entered(lot, -1)
    first.end_turn()
    assert not has_turn(first)
    await asyncio.wait_for(better.wait_for_turn(), 5)
    better.leave()
    assert has_turn(second)
    second.leave()
    assert has_turn(first)


async def test_a_first_stream_that_is_always_given_back_holds_up_none() -> None:
    lot = lot_of()
    first, *others = [entered(lot, priority) for priority in (0, 0, 1, 2)]
    order = []
    for _ in range(9):
        [place] = [each for each in (first, *others) if has_turn(each)]
        order.append(place)
        place.end_turn()
        next_offer = asyncio.Event()
        asyncio.get_running_loop().call_later(0, next_offer.set)  # behind the lot's
        await asyncio.wait_for(next_offer.wait(), 5)
    a, b, c = others
    assert order == [first, a, first, b, first, c, first, a, first]


async def test_an_offer_that_was_given_back_is_followed_by_a_pause(advance: Clock) -> None:
    lot = ParkingLot(8, 60)
    first, second = entered(lot), entered(lot)
    first.end_turn()
    advance(OFFER_INTERVAL_S / 2)
    await settle()
    assert not has_turn(second)
    advance(OFFER_INTERVAL_S / 2)
    await settle()
    assert has_turn(second)


async def test_one_that_ends_while_it_waits_is_never_offered() -> None:
    lot = lot_of()
    first, second, third = entered(lot), entered(lot), entered(lot)
    second.leave()
    first.leave()
    assert has_turn(third)
    assert not has_turn(second)
    assert len(lot) == 1


async def test_a_full_lot_takes_none_and_refuses_new_work_that_could_only_be_parked() -> None:
    lot = lot_of(max_parked=4)
    for _ in range(3):
        entered(lot, 1, "a")
    lot.require_room(Claim(1, "a"))
    entered(lot, 2, "b")
    assert lot.enter(Claim(0, "c")) is None
    with pytest.raises(OverloadedError) as caught:
        lot.require_room(Claim(1, "a"))
    assert caught.value.reason is OverloadReason.PARKED
    assert caught.value.retry_after_s == 5
    lot.require_room(Claim(0, "a"))  # it would go before all that are parked
    lot.require_room(Claim(1, "b"))  # it has less than its part
    with pytest.raises(OverloadedError):
        lot.require_room(Claim(1, "b", weight=0.1))


async def read(stream: GenerationStream) -> list[int]:
    deltas = [each async for together in stream for each in together]
    return [token for each in deltas for token in each.token_ids]


def parking(
    fates: Sequence[Fate], lot: ParkingLot | None = None, first_backoff_s: float = 0.05
) -> tuple[Replicas, Failover, list[str]]:
    """Return a model whose attempts meet these fates, and the notices that its client gets."""
    replicas = Replicas(fates=fates)
    limits = FailoverLimits(timeout_s=5, notice_interval_s=2, first_backoff_s=first_backoff_s)
    notices: list[str] = []
    record = RequestRecord("r", "POST", lambda: 0.0, 0.0)
    record.on_notice = notices.append
    CURRENT_RECORD.set(record)
    return replicas, Failover(replicas, limits, lot=lot_of() if lot is None else lot), notices


@pytest.mark.usefixtures("advance")
async def test_a_parked_stream_goes_on_where_it_was_and_is_no_move() -> None:
    fates = [Fate(2, PARKED), Fate(0, PARKED), Fate(2, PARKED)]
    lot = lot_of()
    replicas, model, notices = parking(fates, lot)
    undisturbed = await read(await Failover(Replicas(), FailoverLimits(5)).send(REQUEST))
    assert await read(await model.send(REQUEST)) == undisturbed
    assert [len(each.generated_token_ids) for each in replicas.requests] == [0, 2, 2, 4]
    assert [each.is_parked for each in replicas.requests] == [False, True, True, True]
    assert all(each.may_park for each in replicas.requests)
    assert all(each.is_resumed for each in replicas.requests[1:])
    assert notices == [Notice.PARKED, Notice.PARKED], "once each time that it has gone on before"
    assert len(lot) == 0


@pytest.mark.usefixtures("advance")
async def test_more_parkings_than_moves_are_allowed_do_no_harm() -> None:
    _, model, _ = parking([Fate(0, PARKED)] * 30)
    assert len(await read(await model.send(REQUEST))) == 6


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "before it was taken"])
@pytest.mark.usefixtures("advance")
async def test_replicas_lost_while_the_stream_is_offered_are_no_moves(is_taken: bool) -> None:
    gone = ReplicaUnavailableError("gone")
    stopped = GenerationAbortedError("stopped")
    losses = [Fate(0, each) if is_taken else Fate(opening_error=each) for each in [stopped] * 30]
    losses.append(Fate(0, gone) if is_taken else Fate(opening_error=gone))
    lot = lot_of()
    replicas, model, notices = parking([Fate(2, PARKED), *losses], lot)
    stream = await model.send(REQUEST)
    assert len(await read(stream)) == 6
    assert notices == [Notice.PARKED]
    assert stream._retries.num_moves == 0  # type: ignore[attr-defined]
    assert all(each.is_parked for each in replicas.requests[1:])
    assert len(lot) == 0


@pytest.mark.usefixtures("advance")
async def test_deaths_of_replicas_to_which_it_is_offered_make_it_a_suspect_which_moves() -> None:
    gone = ReplicaUnavailableError("gone")
    lot = lot_of()
    replicas, model, notices = parking([Fate(2, PARKED), Fate(0, gone), Fate(0, gone)], lot)
    assert len(await read(await model.send(REQUEST))) == 6
    assert [each.num_deaths for each in replicas.requests] == [0, 0, 0, 2]
    assert [each.is_parked for each in replicas.requests] == [False, True, True, False]
    assert notices == [Notice.PARKED, Notice.MOVED]


async def test_an_offer_that_no_replica_answers_in_time_lets_the_others_go_on(
    advance: Clock,
) -> None:
    lot = lot_of()
    never = asyncio.Event()
    replicas, model, _ = parking([Fate(2, PARKED), Fate(waits_for=never)], lot)
    reading = asyncio.ensure_future(read(await model.send(REQUEST)))
    await settle()
    other = entered(lot)
    advance(4.9)
    await settle()
    assert not has_turn(other)
    advance(0.2)
    await settle()
    assert has_turn(other)
    assert replicas.num_opening == 0, "the call was cancelled"
    other.leave()
    assert len(await reading) == 6
    assert len(replicas.requests) == 3


async def test_a_replica_that_takes_an_offer_and_brings_nothing_keeps_it_while_others_go_on(
    advance: Clock,
) -> None:
    lot = lot_of()
    replicas, model, _ = parking([Fate(2, PARKED), Fate(stands_before=2)], lot)
    stream = await model.send(REQUEST)
    reading = asyncio.ensure_future(read(stream))
    await settle()
    other, third = entered(lot), entered(lot)
    advance(4.9)
    await settle()
    assert not has_turn(other)
    advance(0.2)
    await settle()
    assert has_turn(other)
    assert (len(lot), replicas.num_open) == (3, 1)
    other.leave()
    assert has_turn(third)
    await stream.aclose()
    await reading
    assert len(lot) == 1


async def test_one_that_is_given_back_after_others_were_let_go_on_waits_for_them() -> None:
    lot = lot_of()
    first, second = entered(lot), entered(lot)
    lot.let_others(first)
    assert has_turn(second)
    first.end_turn()
    assert not has_turn(first)
    second.leave()
    assert has_turn(first)


@pytest.mark.parametrize("max_parked", [8, 0], ids=["held", "beyond a full lot"])
@pytest.mark.usefixtures("advance")
async def test_a_parked_stream_that_replicas_of_another_version_refuse_looks_for_its_own(
    max_parked: int,
) -> None:
    fates = [Fate(2, PARKED), Fate(opening_error=OTHER), Fate(opening_error=OTHER), Fate(2, PARKED)]
    replicas, model, notices = parking(fates, lot_of(max_parked), first_backoff_s=0)
    stream = await model.send(REQUEST)
    assert len(await read(stream)) == 6
    assert [len(each.generated_token_ids) for each in replicas.requests] == [0, 2, 2, 2, 4]
    assert set(notices) == {Notice.PARKED}
    assert stream._retries.num_moves == 0  # type: ignore[attr-defined]


async def test_a_parked_stream_ends_if_only_another_version_runs_for_too_long(
    advance: Clock,
) -> None:
    _, model, _ = parking([Fate(2, PARKED), *[Fate(opening_error=OTHER)] * 99])
    reading = asyncio.ensure_future(read(await model.send(REQUEST)))
    for _ in range(5):
        await settle()
        assert not reading.done()
        advance(1)
    with pytest.raises(ModelChangedError):
        await reading


@pytest.mark.usefixtures("advance")
async def test_one_that_is_refused_for_its_version_lets_the_others_go_on() -> None:
    lot = lot_of()
    old_is_back = asyncio.Event()
    fates = [Fate(2, PARKED), Fate(opening_error=OTHER), Fate(waits_for=old_is_back)]
    replicas, model, _ = parking(fates, lot)
    reading = asyncio.ensure_future(read(await model.send(REQUEST)))
    await asyncio.wait_for(replicas.opens.wait(), 5)
    assert has_turn(entered(lot))
    assert not replicas.requests[2].is_parked, "it waits for its turn at the replica"
    old_is_back.set()
    assert len(await reading) == 6


@pytest.mark.usefixtures("advance")
async def test_a_suspect_lets_the_others_go_on() -> None:
    lot = lot_of()
    may_run = asyncio.Event()
    gone = ReplicaUnavailableError("gone")
    fates = [Fate(0, PARKED), Fate(0, gone), Fate(waits_for=may_run)]
    replicas, model, _ = parking(fates, lot)
    reading = asyncio.ensure_future(read(await model.send(REQUEST)))
    await asyncio.wait_for(replicas.opens.wait(), 5)
    assert replicas.requests[2].num_deaths == 1
    assert has_turn(entered(lot))
    may_run.set()
    assert len(await reading) == 6


@pytest.mark.usefixtures("advance")
async def test_deaths_before_much_was_gained_where_it_was_parked_are_not_in_a_row() -> None:
    fates = [Fate(1), Fate(PROBATION_TOKENS_AGAIN, PARKED), Fate(0)]
    replicas, model, _ = parking(fates)
    replicas.num_tokens = PROBATION_TOKENS_AGAIN + 4
    await read(await model.send(REQUEST))
    assert replicas.requests[3].num_deaths == 0


@pytest.mark.usefixtures("advance")
async def test_a_stream_beyond_a_full_lot_goes_back_as_one_that_is_not_parked_again() -> None:
    replicas, model, _ = parking([Fate(2, PARKED)], lot_of(max_parked=0))
    assert len(await read(await model.send(REQUEST))) == 6
    assert not replicas.requests[1].is_parked
    assert not replicas.requests[1].may_park
    assert replicas.requests[1].is_resumed


async def test_a_stream_that_is_closed_while_it_is_parked_is_never_offered(advance: Clock) -> None:
    lot = lot_of()
    blocking = entered(lot)
    replicas, model, notices = parking([Fate(2, PARKED)], lot)
    stream = await model.send(REQUEST)
    reading = asyncio.ensure_future(read(stream))
    await settle()
    for _ in range(2):
        advance(2)
        await settle()
    assert notices == [Notice.PARKED] * 3
    await stream.aclose()
    assert len(await reading) == 2
    assert len(lot) == 1
    blocking.leave()
    await settle()
    assert len(replicas.requests) == 1
    assert replicas.num_open == 0


async def test_a_stream_that_is_parked_does_not_stall(advance: Clock) -> None:
    lot = lot_of()
    blocking = entered(lot)
    _, model, _ = parking([Fate(2, PARKED)], lot)
    limits = LimitsConfig(stall_timeout_s=3, total_timeout_s=100)
    reading = asyncio.ensure_future(read(await Deadlines(model, limits).send(REQUEST)))
    for _ in range(10):
        await settle()
        advance(2)
    await settle()
    assert not reading.done()
    blocking.leave()
    assert len(await reading) == 6


async def test_a_stream_that_a_replica_has_taken_from_the_lot_may_stall(advance: Clock) -> None:
    lot = lot_of()
    blocking = entered(lot)
    replicas, model, _ = parking([Fate(2, PARKED), Fate(stands_before=2)], lot)
    limits = LimitsConfig(stall_timeout_s=30, total_timeout_s=100)
    reading = asyncio.ensure_future(read(await Deadlines(model, limits).send(REQUEST)))
    await settle()
    advance(40)
    await settle()
    blocking.leave()
    await settle()
    advance(29)
    await settle()
    assert not reading.done()
    advance(2)
    with pytest.raises(StallTimeoutError):
        await reading
    assert (len(lot), replicas.num_open) == (0, 0)


async def test_a_replica_that_hangs_while_a_parked_stream_is_offered_to_it_stalls_the_stream(
    advance: Clock,
) -> None:
    hangs = Fate(waits_for=asyncio.Event())
    replicas = Replicas(fates=[Fate(2, PARKED), hangs])
    model = Failover(replicas, FailoverLimits(timeout_s=5, first_patience_s=100), lot=lot_of())
    limits = LimitsConfig(stall_timeout_s=30, total_timeout_s=600)
    reading = asyncio.ensure_future(read(await Deadlines(model, limits).send(REQUEST)))
    await settle()
    advance(29)
    await settle()
    assert not reading.done()
    advance(2)
    await settle()
    assert reading.done()
    with pytest.raises(StallTimeoutError):
        await reading
    assert (replicas.num_opening, replicas.num_open) == (0, 0)


async def test_a_lost_stream_that_goes_on_just_before_the_stall_limit_has_all_of_it_again(
    advance: Clock,
) -> None:
    is_up = asyncio.Event()
    replicas = Replicas(fates=[Fate(2), Fate(waits_for=is_up, stands_before=2)])
    model = Failover(replicas, FailoverLimits(timeout_s=90, first_patience_s=90))
    limits = LimitsConfig(stall_timeout_s=30, total_timeout_s=600)
    reading = asyncio.ensure_future(read(await Deadlines(model, limits).send(REQUEST)))
    await settle()
    advance(29)
    is_up.set()
    await settle()
    assert replicas.num_open == 1
    advance(29)
    await settle()
    assert not reading.done()
    advance(2)
    await settle()
    assert reading.done()
    with pytest.raises(StallTimeoutError):
        await reading


async def test_a_stream_beyond_a_full_lot_is_not_held_up_by_a_replica_that_hangs(
    advance: Clock,
) -> None:
    hangs = Fate(waits_for=asyncio.Event())
    replicas = Replicas(fates=[Fate(2, PARKED), hangs])
    model = Failover(replicas, FailoverLimits(timeout_s=90), lot=lot_of(max_parked=0))
    reading = asyncio.ensure_future(read(await model.send(REQUEST)))
    await settle()
    for _ in range(2):
        advance(5.1)
        await settle()
    assert len(await reading) == 6
    assert len(replicas.requests) == 3


async def test_the_stall_limit_counts_from_the_moment_at_which_a_stream_is_offered(
    advance: Clock,
) -> None:
    lot = lot_of()
    blocking = entered(lot)
    _, model, _ = parking([Fate(2, PARKED), Fate(waits_for=asyncio.Event())], lot)
    stream = await model.send(REQUEST)
    reading = asyncio.ensure_future(read(stream))
    await settle()
    advance(7)
    blocking.leave()  # the stream's own task has not run since
    offered_s = asyncio.get_running_loop().time()
    assert stream.waited_until_s == offered_s
    await settle()
    advance(1)
    await settle()
    assert stream.waited_until_s == offered_s
    await stream.aclose()
    await reading


@pytest.mark.usefixtures("advance")
async def test_a_stream_that_finds_a_full_lot_does_not_stall_before_its_search_begins() -> None:
    _, model, _ = parking([Fate(2, PARKED)], lot_of(max_parked=0))
    record = CURRENT_RECORD.get()
    assert record is not None
    stream = await model.send(REQUEST)
    waited_until_s: list[float] = []
    record.on_notice = lambda _: waited_until_s.append(stream.waited_until_s)
    began_s = asyncio.get_running_loop().time()
    await read(stream)
    assert len(waited_until_s) == 1
    assert waited_until_s[0] >= began_s


async def test_a_stream_beyond_a_full_lot_that_no_replica_takes_ends_with_what_happened(
    advance: Clock,
) -> None:
    full = Fate(opening_error=OverloadedError("full", None, 1, OverloadReason.REQUESTS))
    _, model, _ = parking([Fate(2, PARKED), *[full] * 99], lot_of(max_parked=0))
    reading = asyncio.ensure_future(read(await model.send(REQUEST)))
    for _ in range(6):
        await settle()
        advance(1)
    await settle()
    with pytest.raises(ReplicaUnavailableError, match="had made room for others"):
        await reading


async def test_the_total_time_goes_on_while_a_stream_is_parked(advance: Clock) -> None:
    lot = lot_of()
    entered(lot)
    _, model, _ = parking([Fate(2, PARKED)], lot)
    limits = LimitsConfig(stall_timeout_s=3, total_timeout_s=100)
    reading = asyncio.ensure_future(read(await Deadlines(model, limits).send(REQUEST)))
    await settle()
    advance(101)
    with pytest.raises(TotalTimeoutError):
        await reading
    assert len(lot) == 1


async def test_the_next_replica_learns_how_long_the_stream_has_waited(advance: Clock) -> None:
    lot = lot_of()
    blocking = entered(lot)
    replicas, model, _ = parking([Fate(2, PARKED)], lot)
    reading = asyncio.ensure_future(read(await model.send(REQUEST)))
    await settle()
    advance(7)
    await settle()
    blocking.leave()
    assert len(await reading) == 6
    assert replicas.requests[0].claim.waited_s == 0
    assert replicas.requests[1].claim.waited_s == 7


def in_turns(
    fates: Sequence[Fate], max_parked: int = 8
) -> tuple[Replicas, Failover, ParkingLot, RequestRecord]:
    """Return a model that takes turns, its lot, and the record of its request."""
    replicas, lot = Replicas(fates=fates), lot_of(max_parked)
    record = RequestRecord("r", "POST", lambda: 0.0, 0.0)
    CURRENT_RECORD.set(record)
    return replicas, replicas.outlived(FailoverLimits(timeout_s=5), lot), lot, record


async def test_a_stream_is_parked_when_the_turn_of_its_model_is_over_and_goes_on_in_the_next() -> (
    None
):
    next_turn = asyncio.Event()
    stands = Fate(stands_before=2)
    replicas, model, lot, record = in_turns([stands, Fate(waits_for=next_turn)])
    reading = asyncio.create_task(read(await model.send(REQUEST)))
    await replicas.streams[0].stands.wait()
    replicas.leave(0, Departure.PARK)
    await replicas.opens.wait()
    assert (len(lot), replicas.num_open) == (1, 0)
    assert replicas.requests[1].generated_token_ids == (100, 101)
    next_turn.set()
    assert await reading == list(range(100, 106))
    assert (len(lot), record.num_parked, record.num_moves) == (0, 1, 0)


async def test_a_stream_that_nobody_reads_leaves_its_replica_when_the_turn_is_over() -> None:
    replicas, model, _, _ = in_turns([])
    stream = await model.send(REQUEST)
    first = await anext(aiter(stream))
    replicas.leave(0, Departure.PARK)
    await settle()
    assert replicas.num_open == 0
    assert [first[0].token_ids[0], *await read(stream)] == list(range(100, 106))


async def test_a_stream_without_a_place_in_the_lot_runs_on_while_its_replica_may() -> None:
    replicas, model, _, record = in_turns([], max_parked=0)
    stream = await model.send(REQUEST)
    await anext(aiter(stream))
    replicas.leave(0, Departure.PARK)
    await settle()
    assert replicas.num_open == 1
    assert await read(stream) == list(range(101, 106))
    assert (len(replicas.requests), record.num_parked) == (1, 0)


async def test_no_more_streams_leave_their_replica_than_the_lot_takes() -> None:
    replicas, model, _, record = in_turns([], max_parked=1)
    streams = [await model.send(REQUEST) for _ in range(3)]
    for index in range(3):
        replicas.leave(index, Departure.PARK)
    await settle()
    assert replicas.num_open == 2
    await streams[0].aclose()  # while its client reads nothing
    replicas.leave(1, Departure.PARK)
    await settle()
    assert replicas.num_open == 1
    assert await read(streams[1]) == list(range(100, 106))
    assert await read(streams[2]) == list(range(100, 106))
    assert record.num_parked == 1


async def test_a_finished_stream_is_not_parked() -> None:
    replicas, model, lot, _ = in_turns([])
    stream = await model.send(REQUEST)
    assert await read(stream) == list(range(100, 106))
    replicas.leave(0, Departure.PARK)
    await settle()
    assert await read(stream) == []
    assert (len(lot), len(replicas.requests)) == (0, 1)


async def test_a_stream_whose_replica_dies_when_the_turn_is_over_waits_for_the_next(
    advance: Clock,
) -> None:
    next_turn = asyncio.Event()
    waits = Fate(waits_for=next_turn)
    replicas, model, lot, record = in_turns([Fate(2), *[waits] * 20])
    replicas.turn_is_over = True
    reading = asyncio.create_task(read(await model.send(REQUEST)))
    await replicas.opens.wait()
    for _ in range(6):
        advance(10)  # a lost stream would have ended after 5 s
        await settle()
    assert len(lot) == 1
    assert not reading.done()
    next_turn.set()
    assert await reading == list(range(100, 106))
    assert (record.num_parked, record.num_moves, record.num_deaths) == (1, 0, 1)


@pytest.mark.usefixtures("advance")
async def test_a_request_that_may_have_killed_its_replica_is_not_parked_for_the_next_turn() -> None:
    replicas, model, lot, record = in_turns([Fate(0)])
    replicas.turn_is_over = True
    assert await read(await model.send(REQUEST)) == list(range(100, 106))
    assert replicas.requests[1].num_deaths == 1
    assert (len(lot), record.num_parked) == (0, 0)
