"""The worker with a fake in vLLM's place; `test_pooling.py` has the real one."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from deployments.contract.errors import PoolingFailedError, ReplicaUnavailableError
from deployments.contract.pooling import ROW_DTYPE
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.pooling.pooling_worker import BatchStats
from deployments.pooling.request_queue import Job, QueueLimits, RequestQueue, TokenIds
from deployments.vllm_engine import pooling_worker
from deployments.vllm_engine.pooling_worker import EngineLostError, VllmWorker

DEADLINE_S = 20
PROBE = (7,)
BAD, NAN = 666, 667


class FakeEngine:
    """Answers each text with its tokens' sum, once its gate is open."""

    max_batched_tokens = 10
    probe = PROBE

    def __init__(self) -> None:
        self.is_lost = False
        self.hangs = False
        self.was_shut_down = False
        self.seen: list[tuple[TokenIds, TokenIds | None]] = []
        self.num_cancelled = 0
        self.is_open = True
        self._lock = threading.Lock()

    async def check_task(self) -> None:
        """Every task is done."""

    async def compute(self, token_ids: TokenIds, type_ids: TokenIds | None) -> torch.Tensor:
        self.seen.append((token_ids, type_ids))
        if BAD in token_ids:
            raise ValueError("a bad text")
        try:
            while not self.is_open:
                await asyncio.sleep(0.001)
                if self.is_lost:
                    raise EngineLostError
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return torch.tensor([float("nan") if NAN in token_ids else float(sum(token_ids))])

    def note_begin(self) -> None:
        """The fake hangs when it is told to."""

    def is_hung(self) -> bool:
        return self.hangs

    def shutdown(self) -> None:
        self.was_shut_down = True


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def queue() -> RequestQueue:
    return RequestQueue(QueueLimits(8, None))


@pytest.fixture
def batches() -> list[BatchStats]:
    return []


@pytest.fixture
def worker(
    engine: FakeEngine, queue: RequestQueue, batches: list[BatchStats]
) -> Iterator[VllmWorker]:
    made = VllmWorker(lambda: engine, queue, batches.append)
    made.start().result(DEADLINE_S)
    engine.seen.clear()
    batches.clear()
    yield made
    made.stop()


def answered(job: Job) -> list[float]:
    return [float(np.frombuffer(row, ROW_DTYPE)[0]) for row in job.answer.result(DEADLINE_S)]


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_a_job_s_rows_come_in_the_order_of_its_texts(
    worker: VllmWorker, engine: FakeEngine, queue: RequestQueue, batches: list[BatchStats]
) -> None:
    with queue.entered() as job:
        queue.put(job, ((1, 2), (3,), (4, 5)), (None, (0,), (0, 1)))
        assert answered(job) == [3, 3, 9]
    assert sorted(engine.seen) == [((1, 2), None), ((3,), (0,)), ((4, 5), (0, 1))]
    until(lambda: BatchStats(3, 5) in batches)


def test_jobs_wait_in_the_queue_while_vllm_has_a_step_s_tokens(
    worker: VllmWorker, engine: FakeEngine, queue: RequestQueue
) -> None:
    engine.is_open = False
    with queue.entered() as first, queue.entered() as second, queue.entered() as third:
        queue.put(first, ((1,) * 9,))
        until(lambda: queue.num_running == 1)
        queue.put(second, ((2, 2),))
        until(lambda: queue.num_running == 2)
        queue.put(third, ((3,),))
        assert queue.num_waiting == 1
        engine.is_open = True
        assert [answered(job) for job in (first, second, third)] == [[9], [4], [3]]


@pytest.mark.parametrize("token_id", [BAD, NAN])
def test_a_text_that_fails_ends_its_own_job_at_once(
    worker: VllmWorker, engine: FakeEngine, queue: RequestQueue, token_id: int
) -> None:
    engine.is_open = token_id == NAN
    with queue.entered() as bad, queue.entered() as good:
        queue.put(bad, ((1,), (token_id, 2)))
        with pytest.raises(PoolingFailedError, match="a text of 2 tokens") as caught:
            bad.answer.result(DEADLINE_S)
        assert caught.value.param == "input[1]"
        engine.is_open = True
        queue.put(good, ((1,),))
        assert answered(good) == [1]
    assert worker.is_alive


def test_a_client_that_leaves_has_its_texts_aborted(
    worker: VllmWorker, engine: FakeEngine, queue: RequestQueue
) -> None:
    engine.is_open = False
    with queue.entered() as job:
        queue.put(job, ((1,), (2,)))
        until(lambda: len(engine.seen) == 2)
    until(lambda: engine.num_cancelled == 2)
    engine.is_open = True
    worker.ping().result(DEADLINE_S)


def test_a_lost_engine_fails_the_requests_that_run_and_ends_the_worker(
    worker: VllmWorker, engine: FakeEngine, queue: RequestQueue
) -> None:
    engine.is_open = False
    with queue.entered() as job:
        queue.put(job, ((1,), (2,)))
        until(lambda: len(engine.seen) == 2)
        engine.is_lost = True
        with pytest.raises(ReplicaUnavailableError):
            job.answer.result(DEADLINE_S)
    assert not worker.is_alive
    assert isinstance(worker.failure, EngineLostError)
    until(lambda: engine.was_shut_down)
    with pytest.raises(ReplicaUnavailableError):
        worker.ping().result(DEADLINE_S)


def test_an_idle_worker_whose_engine_is_lost_is_not_alive(
    worker: VllmWorker, engine: FakeEngine
) -> None:
    assert worker.is_alive
    engine.is_lost = True
    assert not worker.is_alive


def test_an_engine_that_hangs_is_given_up(
    engine: FakeEngine, queue: RequestQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pooling_worker, "LOOK_S", 0.01)
    worker = VllmWorker(lambda: engine, queue, lambda _: None)
    worker.start().result(DEADLINE_S)
    engine.is_open = False
    engine.hangs = True
    assert not worker.is_stuck  # it has nothing to do
    with queue.entered() as job:
        queue.put(job, ((1,),))
        with pytest.raises(ReplicaUnavailableError):
            job.answer.result(DEADLINE_S)
    assert worker.is_stuck
    assert not worker.is_alive
    until(lambda: engine.was_shut_down)
    worker.stop()


def test_a_ping_runs_a_probe_if_nothing_else_runs(
    worker: VllmWorker, engine: FakeEngine, queue: RequestQueue
) -> None:
    worker.ping().result(DEADLINE_S)
    assert engine.seen == [(PROBE, None)]
    engine.is_open = False
    with queue.entered() as job:
        queue.put(job, ((1,),))
        until(lambda: len(engine.seen) == 2)
        ping = worker.ping()
        engine.is_open = True
        ping.result(DEADLINE_S)
        assert answered(job) == [1]
    assert len(engine.seen) == 2


def test_stopping_fails_what_runs_and_ends_the_engine(
    worker: VllmWorker, engine: FakeEngine, queue: RequestQueue
) -> None:
    engine.is_open = False
    with queue.entered() as job:
        queue.put(job, ((1,) * 20,))
        until(lambda: len(engine.seen) == 1)
        worker.stop()
        with pytest.raises(ReplicaUnavailableError):
            job.answer.result(DEADLINE_S)
    assert engine.was_shut_down
    names = {thread.name for thread in threading.enumerate()}
    assert not any(name.startswith("pooler") for name in names)


def test_errors_of_the_start_reach_the_caller(queue: RequestQueue, engine: FakeEngine) -> None:
    def fail() -> FakeEngine:
        raise OSError("no such file")

    with pytest.raises(OSError, match="no such file"):
        VllmWorker(fail, queue, lambda _: None).start().result(DEADLINE_S)
    engine.probe = (BAD,)
    with pytest.raises(UnsupportedModelError, match="failed on a text of 1 tokens"):
        VllmWorker(
            lambda: engine, RequestQueue(QueueLimits(8, None)), lambda _: None
        ).start().result(DEADLINE_S)
    until(lambda: engine.was_shut_down)


def test_a_ping_does_not_wait_for_a_text_whose_client_has_left(
    worker: VllmWorker, engine: FakeEngine, queue: RequestQueue
) -> None:
    engine.is_open = False
    with queue.entered() as job:
        queue.put(job, ((1,),))
        until(lambda: len(engine.seen) == 1)
        ping = worker.ping()
        with pytest.raises(TimeoutError):
            ping.result(0.05)
    until(lambda: len(engine.seen) == 2)
    engine.is_open = True
    ping.result(DEADLINE_S)
    assert engine.seen[-1] == (PROBE, None)
