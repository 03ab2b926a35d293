import asyncio
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from mmap import PAGESIZE

import numpy as np
import pytest
import torch

from deployments.compute.cpu.linear.stored_weights import weight_memory
from deployments.contract.errors import PoolingFailedError, ReplicaUnavailableError
from deployments.contract.pooling import ROW_DTYPE
from deployments.pooling.device_worker import DeviceWorker
from deployments.pooling.lanes import MIN_LANE_TOKENS
from deployments.pooling.pooling_worker import BatchStats
from deployments.pooling.request_queue import Job, QueueLimits, RequestQueue, TokenIds
from tests.deadline import until
from tests.failing import failing

DEADLINE_S = 20

NAN_TOKEN = 113
"""The first token of a text whose result is NaN."""

Batch = tuple[TokenIds, ...]


class GatedDevice:
    """A classifier that runs a batch when told to; its result for a text is the first token."""

    device = torch.device("cpu")
    num_lanes = 1
    max_batched_tokens = 1000
    probe = (0,)
    max_batch_s = 1e9

    def __init__(self, *, is_padded: bool = False) -> None:
        self.model = torch.nn.Linear(512, 128)
        self.is_padded = is_padded
        self.batches: list[Batch] = []
        self.ran_on: list[tuple[str, int]] = []
        self.max_tokens = 10**9
        self.error: Callable[[TokenIds], Exception | None] = lambda _: None
        self.has_begun = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)
        self.is_open = True

    def __call__(
        self, sequences: Sequence[TokenIds], type_ids: Sequence[TokenIds | None] = ()
    ) -> torch.Tensor:
        self.batches.append(tuple(sequences))
        self.ran_on.append((threading.current_thread().name, torch.get_num_threads()))
        self.has_begun.release()
        if not self.is_open:
            assert self.may_go_on.acquire(timeout=DEADLINE_S)
        if sum(map(len, sequences)) > self.max_tokens:
            raise torch.OutOfMemoryError("out of memory")
        for sequence in sequences:
            error = self.error(sequence)
            if error is not None:
                raise error
        return torch.tensor([[torch.nan if s[0] == NAN_TOKEN else float(s[0])] for s in sequences])

    def wait_for_batch(self) -> None:
        assert self.has_begun.acquire(timeout=DEADLINE_S)

    def open(self, num_batches: int = 1) -> None:
        """Run all batches at once from now on, and these that wait."""
        self.is_open = True
        self.may_go_on.release(num_batches)


def on_two_threads(device: GatedDevice) -> GatedDevice:
    torch.set_num_threads(2)  # a new thread takes the number that any thread set last
    return device


class Replica:
    """A worker and its queue."""

    def __init__(self, device: GatedDevice, max_batched_tokens: int = 1000) -> None:
        self.device = device
        self.queue = RequestQueue(QueueLimits(1000, None))
        self.stats: list[BatchStats] = []
        self.stack = ExitStack()
        device.max_batched_tokens = max_batched_tokens
        self.worker = DeviceWorker(lambda: on_two_threads(device), self.queue, self.stats.append)
        self.worker.start().result(DEADLINE_S)

    def ask(self, *texts: TokenIds) -> Job:
        job = self.stack.enter_context(self.queue.entered())
        self.queue.put(job, texts)
        return job

    @contextmanager
    def is_busy(self) -> Iterator[Job]:
        """Let the device compute a text until the block ends; what is asked in it waits."""
        self.device.is_open = False
        job = self.ask((1,))
        self.device.wait_for_batch()
        yield job
        self.device.open()

    def end(self) -> None:
        self.device.open(1000)
        self.worker.stop()
        self.stack.close()


@pytest.fixture
def device() -> GatedDevice:
    return GatedDevice()


@pytest.fixture
def replica(device: GatedDevice) -> Iterator[Replica]:
    made = Replica(device)
    yield made
    made.end()
    assert not made.worker.is_alive


def answer(job: Job) -> list[tuple[float, ...]]:
    return [tuple(np.frombuffer(row, ROW_DTYPE).tolist()) for row in job.answer.result(DEADLINE_S)]


def test_an_idle_device_takes_a_request_at_once(replica: Replica) -> None:
    assert answer(replica.ask((5, 1), (6,))) == [(5.0,), (6.0,)]
    assert replica.device.batches == [((5, 1), (6,))]


def test_a_device_that_becomes_free_takes_all_waiting_requests(replica: Replica) -> None:
    with replica.is_busy() as first:
        later = [replica.ask((i,), (i, i)) for i in range(2, 40)]
    assert [answer(job) for job in (first, *later)][1:] == [[(i,), (i,)] for i in range(2, 40)]
    assert replica.device.batches == [
        ((1,),),
        tuple(t for i in range(2, 40) for t in ((i,), (i, i))),
    ]
    assert [stats.num_sequences for stats in replica.stats][:1] == [1]


def test_micro_batches_are_bounded_by_tokens(device: GatedDevice) -> None:
    replica = Replica(device, max_batched_tokens=10)
    with replica.is_busy():
        jobs = [replica.ask((i,) * 4) for i in range(2, 7)]
    assert [answer(job) for job in jobs] == [[(float(i),)] for i in range(2, 7)]
    replica.worker.stop()
    assert [len(batch) for batch in device.batches] == [1, 2, 2, 1]
    assert replica.stats == [BatchStats(1, 1), BatchStats(2, 8), BatchStats(2, 8), BatchStats(1, 4)]


def test_a_short_text_is_answered_after_a_piece_or_two_of_a_long_one(replica: Replica) -> None:
    with replica.is_busy():
        long = replica.ask(*[(i,) * MIN_LANE_TOKENS for i in range(2, 22)])
        short = replica.ask((50,))
        was_answered = list[bool]()
        long.answer.add_done_callback(lambda _: was_answered.append(short.answer.done()))
    assert answer(long) == [(float(i),) for i in range(2, 22)]
    assert was_answered == [True]
    assert [text[0] for text in replica.device.batches[1]] == [2, 50, 3]
    assert sum(len(batch) for batch in replica.device.batches) == 22


def test_padded_texts_are_sorted_and_a_sweep_is_finished_before_newer_texts(
    device: GatedDevice,
) -> None:
    device.is_padded = True
    replica = Replica(device, max_batched_tokens=8)
    device.is_open = False
    replica.ask((1,))
    device.wait_for_batch()
    long, short = replica.ask((2,) * 8), replica.ask((3,) * 2)
    device.may_go_on.release()
    device.wait_for_batch()
    newcomer = replica.ask((4,))
    device.open()
    for job in (long, short, newcomer):
        answer(job)
    replica.worker.stop()
    # The newcomer is shorter than the long one, and still comes after it.
    assert [batch[0][0] for batch in device.batches] == [1, 3, 2, 4]


def test_a_request_is_answered_as_soon_as_its_last_text_is_done(device: GatedDevice) -> None:
    replica = Replica(device, max_batched_tokens=2)
    device.is_open = False
    blocker = replica.ask((1,))
    device.wait_for_batch()
    small, large = replica.ask((2, 2)), replica.ask((3, 3), (4, 4))
    for _ in range(2):
        device.may_go_on.release()
        device.wait_for_batch()
    assert answer(blocker)
    assert answer(small) == [(2.0,)]
    assert not large.answer.done()
    device.open()
    assert answer(large) == [(3.0,), (4.0,)]
    replica.worker.stop()


def test_a_text_that_fails_fails_only_its_own_request(replica: Replica) -> None:
    replica.device.error = lambda s: IndexError("index out of range") if 99 in s else None
    with replica.is_busy():
        good = [replica.ask((i,), (i + 1,)) for i in range(2, 12)]
        bad = replica.ask((20,), (21, 99))
    assert [answer(job) for job in good] == [[(i,), (i + 1,)] for i in range(2, 12)]
    with pytest.raises(PoolingFailedError, match="failed on a text of 2 tokens") as caught:
        answer(bad)
    assert caught.value.param == "input[1]"


def test_numbers_that_are_not_finite_are_an_error(replica: Replica) -> None:
    with replica.is_busy():
        good, bad = replica.ask((2,)), replica.ask((NAN_TOKEN,))
    assert answer(good) == [(2.0,)]
    with pytest.raises(PoolingFailedError, match="no finite numbers"):
        answer(bad)


def test_a_batch_that_is_out_of_memory_is_split_and_the_next_ones_are_smaller(
    replica: Replica,
) -> None:
    replica.device.max_tokens = 5
    texts = [(i, i) for i in range(2, 12)]
    assert answer(replica.ask(*texts)) == [(float(i),) for i in range(2, 12)]
    replica.device.batches.clear()
    assert answer(replica.ask(*texts)) == [(float(i),) for i in range(2, 12)]
    # 20 tokens were too many, and so were 10; the budget is half of the largest that failed.
    assert max(sum(map(len, batch)) for batch in replica.device.batches) <= 10


def test_a_text_that_exceeds_the_memory_by_itself_fails_by_itself(replica: Replica) -> None:
    replica.device.max_tokens = 5
    with pytest.raises(PoolingFailedError, match="not enough memory on a text of 6"):
        answer(replica.ask((1,) * 6))
    assert answer(replica.ask((2,) * 5)) == [(2.0,)]


def test_the_remaining_texts_of_an_abandoned_request_are_dropped(device: GatedDevice) -> None:
    replica = Replica(device, max_batched_tokens=2)
    device.is_open = False
    with replica.queue.entered() as job:
        replica.queue.put(job, ((1, 1), (2, 2), (3, 3)))
        device.wait_for_batch()
    device.open()
    assert answer(replica.ask((4,))) == [(4.0,)]
    replica.worker.stop()
    assert device.batches == [((1, 1),), ((4,),)]


def test_a_request_that_was_cancelled_while_it_waited_never_runs(replica: Replica) -> None:
    with replica.is_busy() as first:
        gone, stays = replica.ask((2,)), replica.ask((3,))
        assert gone.answer.cancel()
    assert answer(first)
    assert answer(stays) == [(3.0,)]
    assert replica.device.batches == [((1,),), ((3,),)]


def test_a_ping_is_answered_by_the_batch_that_runs(replica: Replica) -> None:
    with replica.is_busy() as job:
        ping = replica.worker.ping()
    assert ping.result(DEADLINE_S) is None
    assert answer(job)


def test_a_ping_is_answered_when_all_requests_taken_with_it_are_abandoned(
    device: GatedDevice,
) -> None:
    pings = list[Future[None]]()
    queue = RequestQueue(QueueLimits(1000, None))

    def ping_once(_: BatchStats) -> None:
        """Ping between a micro-batch and the next call of `take_all`."""
        if not pings:
            pings.append(worker.ping())

    worker = DeviceWorker(lambda: device, queue, ping_once)
    worker.start().result(DEADLINE_S)
    device.is_open = False
    with queue.entered() as job, queue.entered() as gone:
        queue.put(job, ((1,),))
        device.wait_for_batch()
        gone.has_left = True  # as if it left just after it was taken
        queue.put(gone, ((2,),))
        device.open()
        assert answer(job) == [(1.0,)]
        device.wait_for_batch()
        pings[0].result(DEADLINE_S)
    worker.stop()
    assert device.batches == [((1,),), ((0,),)]


async def asleep(replica: Replica) -> torch.Tensor:
    """Let a worker sleep; return what its model's weights were before."""
    weights = replica.device.model.weight.detach().clone()
    assert await replica.worker.sleep()
    return weights


def is_given_back(device: GatedDevice) -> bool:
    """Return whether the whole pages of the weights are empty."""
    memory = weight_memory(device.model)
    return not any(any(each.content[PAGESIZE:-PAGESIZE]) for each in memory)


async def test_a_model_that_sleeps_holds_no_weights_and_has_the_same_ones_when_it_wakes(
    replica: Replica,
) -> None:
    for _ in range(2):
        weights = await asleep(replica)
        assert is_given_back(replica.device)
        await replica.worker.wake()
        assert torch.equal(replica.device.model.weight, weights)
        assert answer(replica.ask((5,))) == [(5.0,)]


@pytest.mark.parametrize("num_lanes", [1, 2])
async def test_pings_of_a_model_that_sleeps_are_answered_without_a_probe(
    device: GatedDevice, num_lanes: int
) -> None:
    device.num_lanes = num_lanes
    replica = Replica(device)
    await asleep(replica)
    replica.worker.ping().result(DEADLINE_S)
    assert device.batches == []
    await replica.worker.wake()
    replica.worker.ping().result(DEADLINE_S)
    assert device.batches == [((0,),)]
    replica.end()


async def test_a_model_falls_asleep_once_its_micro_batch_has_run(replica: Replica) -> None:
    with replica.is_busy() as job:
        sleeping = asyncio.ensure_future(replica.worker.sleep())
        # The worker's thread looks whether a lane works, and waits.
        await until(lambda: replica.worker._lanes._freed._waiters)  # type: ignore[attr-defined]
        assert not is_given_back(replica.device)
    assert await sleeping
    assert answer(job) == [(1.0,)]
    assert is_given_back(replica.device)
    await replica.worker.wake()


async def test_a_model_whose_micro_batch_hangs_does_not_sleep(replica: Replica) -> None:
    replica.device.max_batch_s = 0.001
    with replica.is_busy():
        assert not await replica.worker.sleep()
        assert not is_given_back(replica.device)
    replica.device.max_batch_s = 1e9


async def test_a_model_whose_weights_can_not_be_written_stays_awake(
    replica: Replica, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", failing(OSError("the disk is full")))
    assert not await replica.worker.sleep()
    assert "the model can't sleep: its weights can't be written: the disk is full" in caplog.text
    assert answer(replica.ask((5,))) == [(5.0,)]


async def test_a_model_that_can_not_wake_ends_the_worker_with_the_reason(
    replica: Replica,
) -> None:
    await asleep(replica)
    file = replica.worker._weights._file
    assert file is not None
    os.ftruncate(file.fileno(), 0)
    with pytest.raises(ReplicaUnavailableError, match="could not be woken: the file of the weig"):
        await replica.worker.wake()
    assert not replica.worker.is_alive
    assert isinstance(replica.worker.failure, OSError)
    for change in (replica.worker.sleep, replica.worker.wake):
        with pytest.raises(ReplicaUnavailableError, match="worker has ended"):
            await change()


class LatePinger(DeviceWorker):
    """It is pinged after its thread has answered the last pings and before the thread ends."""

    late: "Future[None] | None" = None
    _is_late = False

    def _answer_pings(self, error: Exception | None) -> None:
        super()._answer_pings(error)
        if error is not None and not self._is_late:
            self._is_late = True
            self.late = self.ping()


def test_a_ping_between_the_thread_s_last_answers_and_its_end_is_answered(
    device: GatedDevice,
) -> None:
    worker = LatePinger(lambda: device, RequestQueue(QueueLimits(1, None)), lambda _: None)
    worker.start().result(DEADLINE_S)
    worker.stop()
    assert worker.late is not None
    assert isinstance(worker.late.exception(timeout=0), ReplicaUnavailableError)


def test_a_failed_probe_fails_its_ping_and_the_worker_continues(replica: Replica) -> None:
    replica.device.max_tokens = 0
    with pytest.raises(ReplicaUnavailableError, match="failed a probe"):
        replica.worker.ping().result(DEADLINE_S)
    replica.device.max_tokens = 5
    assert answer(replica.ask((2,))) == [(2.0,)]
    replica.worker.ping().result(DEADLINE_S)


def test_an_idle_device_runs_a_probe_for_a_ping(replica: Replica) -> None:
    replica.worker.ping().result(DEADLINE_S)
    assert replica.device.batches == [((0,),)]
    assert replica.worker.num_batches == 1


@pytest.mark.parametrize("is_busy", [True, False])
def test_stopping_leaves_no_thread_and_fails_unfinished_requests(
    device: GatedDevice, is_busy: bool
) -> None:
    replica = Replica(device, max_batched_tokens=2)
    jobs: list[Job] = []
    if is_busy:
        device.is_open = False
        jobs = [replica.ask((1, 1), (2, 2)), replica.ask((3, 3))]
        device.wait_for_batch()
        replica.queue.close()
        device.may_go_on.release(3)
    replica.worker.stop()
    assert not replica.worker.is_alive
    assert "pooler" not in {thread.name for thread in threading.enumerate()}
    for job in jobs:
        with pytest.raises(ReplicaUnavailableError):
            answer(job)
    with pytest.raises(ReplicaUnavailableError):
        replica.worker.ping().result(DEADLINE_S)


def test_a_lost_device_ends_the_worker_and_is_blamed_on_no_text(device: GatedDevice) -> None:
    replica = Replica(device)
    device.error = lambda _: torch.AcceleratorError("illegal access")
    with pytest.raises(ReplicaUnavailableError):
        answer(replica.ask((1,)))
    replica.worker.stop()
    assert not replica.worker.is_alive
    assert isinstance(replica.worker.failure, torch.AcceleratorError)


def test_a_worker_that_hangs_is_abandoned_and_its_requests_fail(device: GatedDevice) -> None:
    replica = Replica(device)
    device.is_open, device.max_batch_s = False, 0.0
    assert not replica.worker.is_stuck
    running = replica.ask((1,))
    device.wait_for_batch()
    waiting = replica.ask((2,))
    ping = replica.worker.ping()
    assert replica.worker.is_stuck
    replica.worker.abandon()
    for future in (running.answer, waiting.answer, ping):
        with pytest.raises(ReplicaUnavailableError):
            future.result(DEADLINE_S)
    assert not replica.worker.is_alive
    replica.worker.stop()  # does not wait for the micro-batch
    device.may_go_on.release()
    replica.worker._thread.join(DEADLINE_S)
    assert not replica.worker._thread.is_alive()


def test_the_error_of_loading_the_model_is_passed_on() -> None:
    queue = RequestQueue(QueueLimits(1, None))
    worker = DeviceWorker(failing(ValueError("no such folder")), queue, lambda _: None)
    with pytest.raises(ValueError, match="no such folder"):
        worker.start().result(DEADLINE_S)
    assert queue.is_closed


@pytest.fixture
def two_lanes(device: GatedDevice) -> Iterator[Replica]:
    device.num_lanes = 2
    device.is_open = False
    made = Replica(device)
    yield made
    made.end()
    assert not [t for t in threading.enumerate() if t.name.startswith("pooler")]


def long(first: int) -> TokenIds:
    """Return a text that is long enough for a lane of its own."""
    return (first,) * MIN_LANE_TOKENS


def on_both(lanes: Replica) -> Job:
    """Ask for two texts, and wait until each lane computes one."""
    job = lanes.ask(long(1), long(2))
    lanes.device.wait_for_batch()
    lanes.device.wait_for_batch()
    return job


def test_lanes_run_at_the_same_time_and_a_request_has_one_answer(two_lanes: Replica) -> None:
    both = on_both(two_lanes)
    assert sorted(two_lanes.device.batches) == [(long(1),), (long(2),)]
    two_lanes.device.may_go_on.release(2)
    assert answer(both) == [(1.0,), (2.0,)]


def test_a_free_lane_takes_new_texts_while_the_other_computes(two_lanes: Replica) -> None:
    both = on_both(two_lanes)
    late = two_lanes.ask((3,), (4,))
    two_lanes.device.may_go_on.release()
    two_lanes.device.wait_for_batch()
    assert two_lanes.device.batches[2] == ((3,), (4,))
    assert not both.answer.done()
    two_lanes.device.open(2)
    assert answer(late) == [(3.0,), (4.0,)]
    assert answer(both)


def test_texts_of_one_request_that_fail_on_two_lanes_fail_it_once(two_lanes: Replica) -> None:
    two_lanes.device.error = lambda s: IndexError("index out of range")
    both = on_both(two_lanes)
    two_lanes.device.open(2)
    with pytest.raises(PoolingFailedError, match="failed on a text"):
        answer(both)
    two_lanes.device.error = lambda _: None
    assert answer(two_lanes.ask((5,), (6,))) == [(5.0,), (6.0,)]
    assert two_lanes.worker.is_alive


def test_a_lane_whose_device_is_lost_ends_the_others_too(two_lanes: Replica) -> None:
    two_lanes.device.error = lambda s: (
        torch.AcceleratorError("illegal access") if s[0] == 2 else None
    )
    both = on_both(two_lanes)
    two_lanes.device.open(2)
    with pytest.raises(ReplicaUnavailableError):
        answer(both)
    two_lanes.worker.stop()
    assert not two_lanes.worker.is_alive
    assert sorted(two_lanes.device.batches) == [(long(1),), (long(2),)]


def test_only_the_thread_that_loads_the_model_computes_on_several(two_lanes: Replica) -> None:
    """A second pool of threads would keep libgomp from spinning."""
    two_lanes.device.open(2)
    answer(two_lanes.ask(long(1), long(2)))
    for first in range(3, 20):
        answer(two_lanes.ask((first,)))
    ran_on = set(two_lanes.device.ran_on)
    assert ("pooler", 2) in ran_on
    assert {threads for name, threads in ran_on if name != "pooler"} == {1}
