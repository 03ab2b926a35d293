import asyncio
import signal
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest

from loadtest.load.level import Level
from loadtest.load.plan import LevelPlan
from loadtest.load.question_sampler import QuestionSampler
from loadtest.load.questions import Question
from loadtest.load.stop import Stop
from loadtest.mock.script import Behaviour, Fault
from loadtest.results.record import ErrorKind, LevelRecord, RequestRecord
from tests.loadtest.mocked import Aim, aimed, until
from tests.stopped_clock import Clock, settle

SILENT = Behaviour(fault=Fault.TIMEOUT_STALL, fault_after=1)


class Running:
    """A level that runs, and what it has kept so far."""

    def __init__(
        self, aim: Aim, plan: LevelPlan, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stop = Stop()
        self.records: list[RequestRecord] = []
        self.told: list[LevelRecord] = []
        sampler = QuestionSampler([Question("why?")])
        level = Level(plan, aim.sender, sampler, self.stop, clock, self.records.append)
        self.task = asyncio.ensure_future(level.run(self.told.append))


def running_by_the_loop(aim: Aim, plan: LevelPlan) -> Running:
    """Run a level by the event loop's clock, which the test has stopped."""
    return Running(aim, plan, asyncio.get_running_loop().time)


async def sent(aim: Aim, number: int) -> None:
    """Wait until so many requests have come, while the event loop's clock stands."""
    while len(aim.server.bodies) < number:  # noqa: ASYNC110 - the mock tells nobody
        await asyncio.sleep(0)


async def run(plan: LevelPlan, *behaviours: Behaviour) -> tuple[LevelRecord, list[RequestRecord]]:
    async with aimed(*behaviours) as aim:
        running = Running(aim, plan)
        return await running.task, running.records


async def test_each_queue_sends_its_requests_one_after_another() -> None:
    level, records = await run(LevelPlan(0, num_queues=3, num_loops=4), Behaviour(gap_ms=1))
    assert Counter(record.queue for record in records) == {0: 4, 1: 4, 2: 4}
    assert sorted(record.index for record in records) == list(range(12))
    assert all(record.scheduled_s == record.sent_s for record in records)
    for queue in range(3):
        of_queue = [record for record in records if record.queue == queue]
        pairs = pairwise(of_queue)
        assert all(after.sent_s >= before.ended_s for before, after in pairs)
    assert level.ended_s >= max(record.ended_s for record in records)
    assert level.deadline_s is None
    assert not level.was_stopped


async def test_a_total_is_divided_among_the_queues() -> None:
    _, records = await run(LevelPlan(0, num_queues=3, num_requests=7, num_warmups=2))
    assert Counter(record.is_warmup for record in records) == {False: 7, True: 2}


async def test_a_total_holds_with_a_limit_on_requests_in_flight() -> None:
    _, records = await run(LevelPlan(0, num_queues=8, num_requests=5, max_inflight=2))
    assert len(records) == 5


async def test_warm_up_comes_first_and_is_marked() -> None:
    level, records = await run(LevelPlan(3, num_queues=2, num_loops=1, num_warmups=2))
    by_index = sorted(records, key=lambda record: record.index)
    assert [record.is_warmup for record in by_index] == [True, True, False, False]
    assert level.started_s <= by_index[0].sent_s
    assert by_index[1].ended_s <= level.warm_s <= by_index[2].sent_s
    assert {record.level for record in records} == {3}


async def test_the_record_is_reported_when_the_level_and_when_its_load_begins() -> None:
    async with aimed() as aim:
        running = Running(aim, LevelPlan(0, num_queues=1, num_loops=1, duration_s=None))
        ended = await running.task
    first, second = running.told
    assert first.ended_s == first.started_s == second.started_s
    assert ended == second.model_copy(
        update={"ended_s": ended.ended_s, "lag_ms": ended.lag_ms, "cpu_share": ended.cpu_share}
    )


async def test_nothing_is_sent_after_the_deadline_but_requests_in_flight_finish(
    advance: Clock,
) -> None:
    async with aimed() as aim:
        running = running_by_the_loop(aim, LevelPlan(0, num_queues=2, duration_s=10, grace_s=60))
        await sent(aim, 6)
        advance(10)
        num_started = aim.observer.seen.count("started")
        level = await running.task
    assert level.deadline_s == level.started_s + 10
    assert [record.error for record in running.records] == [None] * num_started


async def test_requests_that_outlive_the_grace_period_are_cancelled(advance: Clock) -> None:
    async with aimed(SILENT) as aim:
        running = running_by_the_loop(aim, LevelPlan(0, num_queues=2, duration_s=10, grace_s=5))
        await sent(aim, 2)
        for seconds in (10, 4):
            advance(seconds)
            await settle()
            assert not running.task.done()
        advance(1)
        await running.task
    assert [record.error for record in running.records] == [ErrorKind.CANCELLED] * 2


async def test_a_ramp_starts_the_queues_one_after_another() -> None:
    plan = LevelPlan(0, num_queues=4, num_loops=1, ramp_s=0.2)
    level, records = await run(plan)
    started_s = level.warm_s - 0.2
    sent_s = sorted(record.sent_s - started_s for record in records)
    assert all(after_s >= 0.05 * queue - 0.002 for queue, after_s in enumerate(sent_s))


async def test_a_queue_pauses_between_its_requests() -> None:
    _, records = await run(LevelPlan(0, num_queues=1, num_loops=3, interval_s=0.03))
    pairs = list(pairwise(records))
    assert len(pairs) == 2
    assert all(after.sent_s - before.ended_s >= 0.028 for before, after in pairs)


async def test_an_open_loop_sends_on_schedule_even_if_no_request_ends() -> None:
    plan = LevelPlan(0, rate_per_s=100, is_poisson=False, num_requests=10, grace_s=0.0)
    async with aimed(SILENT) as aim:
        running = Running(aim, plan)
        await until(lambda: len(aim.server.bodies) == 10)
        running.stop.request(signal.SIGINT)
        await running.task
    scheduled_s = sorted(record.scheduled_s for record in running.records)
    gaps = [b - a for a, b in pairwise(scheduled_s)]
    assert gaps == pytest.approx([0.01] * 9)
    assert all(record.sent_s >= record.scheduled_s for record in running.records)
    assert {record.queue for record in running.records} == {None}


async def test_a_limit_on_requests_in_flight_holds_and_the_wait_counts_as_delay() -> None:
    plan = LevelPlan(
        0, rate_per_s=1000, is_poisson=False, num_requests=6, max_inflight=2, grace_s=60
    )
    _, records = await run(plan, Behaviour(first_token_ms=30, num_events=1))
    for record in records:
        under_way = [other for other in records if other.sent_s <= record.sent_s < other.ended_s]
        assert len(under_way) <= 2
    assert max(record.sent_s - record.scheduled_s for record in records) > 0.04


async def test_requests_that_were_due_but_never_sent_are_counted(advance: Clock) -> None:
    plan = LevelPlan(0, rate_per_s=1, is_poisson=False, duration_s=20, max_inflight=1, grace_s=0.0)
    async with aimed(SILENT) as aim:
        running = running_by_the_loop(aim, plan)
        await sent(aim, 1)
        advance(20)
        level = await running.task
    assert len(running.records) == 1
    assert level.num_unsent == 19


async def test_a_limit_on_requests_in_flight_holds_in_a_closed_loop() -> None:
    plan = LevelPlan(0, num_queues=4, num_loops=2, max_inflight=1)
    _, records = await run(plan, Behaviour(gap_ms=1))
    ordered = sorted(records, key=lambda record: record.sent_s)
    assert len(ordered) == 8
    pairs = pairwise(ordered)
    assert all(after.sent_s >= before.ended_s for before, after in pairs)


async def test_a_first_signal_lets_requests_in_flight_finish(advance: Clock) -> None:
    async with aimed(Behaviour(first_token_ms=50, num_events=2)) as aim:
        running = Running(aim, LevelPlan(0, num_queues=3, num_loops=1000, grace_s=1e6))
        await sent(aim, 3)
        running.stop.request(signal.SIGTERM)
        await settle()
        while not running.task.done():  # the mock looks at another clock again and again
            advance(1)
            await asyncio.sleep(0)
        level = await running.task
    assert [record.error for record in running.records] == [None] * 3
    assert level.was_stopped
    assert running.stop.signal_number == signal.SIGTERM


async def test_a_second_signal_cancels_requests_and_keeps_their_records() -> None:
    async with aimed(SILENT) as aim:
        running = Running(aim, LevelPlan(0, num_queues=3, num_loops=1000, grace_s=3600))
        await until(lambda: aim.observer.num_tokens == 3)
        running.stop.request(signal.SIGINT)
        running.stop.request(signal.SIGTERM)
        level = await running.task
    assert [record.error for record in running.records] == [ErrorKind.CANCELLED] * 3
    assert [len(record.content_s) for record in running.records] == [1] * 3
    assert level.was_stopped
    assert running.stop.signal_number == signal.SIGINT


async def test_a_stop_during_warm_up_sends_nothing_more() -> None:
    async with aimed(SILENT) as aim:
        running = Running(aim, LevelPlan(0, num_queues=3, num_loops=9, num_warmups=5, grace_s=0.0))
        await until(lambda: len(aim.server.bodies) == 1)
        running.stop.request(signal.SIGINT)
        await running.task
    assert [record.error for record in running.records] == [ErrorKind.CANCELLED]
    assert [record.is_warmup for record in running.records] == [True]
