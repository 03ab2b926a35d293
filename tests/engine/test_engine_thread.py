import threading
from collections.abc import Callable, Iterator

import pytest

from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.detokenizing.detokenizers import Deltas
from deployments.engine.engine import Engine
from deployments.engine.engine_thread import EngineDeadError, EngineThread
from deployments.engine.scheduling.sequence import SequenceRequest
from tests.engine.tiny_models import generate, load, make_engine, qwen2

DEADLINE_S = 20
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


class Inbox:
    """Collects the deltas that the thread hands over and waits for those that a test expects."""

    def __init__(self) -> None:
        self.hand_overs: list[Deltas] = []
        self._changed = threading.Condition()

    def __call__(self, deltas: Deltas) -> None:
        with self._changed:
            self.hand_overs.append(deltas)
            self._changed.notify_all()

    def deltas(self, sequence_id: str) -> list[TextDelta]:
        return [d for deltas in list(self.hand_overs) for name, d in deltas if name == sequence_id]

    def finish_reason(self, sequence_id: str) -> FinishReason | None:
        deltas = self.deltas(sequence_id)
        return deltas[-1].finish_reason if deltas else None

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, DEADLINE_S), (
                "the thread did not reach the expected state in time"
            )


class Gate:
    """Blocks an engine before a step, so that a test can act meanwhile; can also make it raise."""

    def __init__(self, max_num_seqs: int = 1) -> None:
        self.engine = make_engine(load(qwen2), max_num_seqs=max_num_seqs)
        self.is_reached = threading.Event()
        self.may_go_on = threading.Event()
        self.error: BaseException | None = None
        self._step = self.engine.step
        self.engine.step = self._held_step  # type: ignore[method-assign] # a fault to inject

    def _held_step(self) -> Deltas:
        self.is_reached.set()
        assert self.may_go_on.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return self._step()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def start(inbox: Inbox) -> Iterator[Callable[[Callable[[], Engine]], EngineThread]]:
    threads: list[EngineThread] = []

    def start(make: Callable[[], Engine]) -> EngineThread:
        thread = EngineThread(make, inbox)
        threads.append(thread)
        thread.start().result(DEADLINE_S)
        return thread

    yield start
    for thread in threads:
        thread.stop()


Start = Callable[[Callable[[], Engine]], EngineThread]


def greedy(name: str, max_tokens: int = 8) -> SequenceRequest:
    return SequenceRequest(name, (60, 61), SamplingParams(temperature=0, max_tokens=max_tokens))


def test_sequences_run_to_their_end(start: Start, inbox: Inbox) -> None:
    thread = start(lambda: make_engine(load(qwen2)))
    for name in "ab":
        thread.add(greedy(name))
    inbox.wait_until(lambda: all(inbox.finish_reason(name) for name in "ab"))
    expected = generate(qwen2, (60, 61), 8)
    for name in "ab":
        assert [i for delta in inbox.deltas(name) for i in delta.token_ids] == expected


def test_a_step_is_handed_over_in_one_call(start: Start, inbox: Inbox) -> None:
    gate = Gate(max_num_seqs=3)
    thread = start(lambda: gate.engine)
    for name in "abc":
        thread.add(greedy(name))
    gate.may_go_on.set()
    inbox.wait_until(lambda: all(inbox.finish_reason(name) for name in "abc"))
    for deltas in inbox.hand_overs:
        assert len({name for name, _ in deltas}) == len(deltas)
    assert any(len(deltas) == 3 for deltas in inbox.hand_overs)


def test_where_steps_run_by_themselves_texts_are_handed_over_within_the_next(
    start: Start, inbox: Inbox
) -> None:
    engine = make_engine(load(qwen2))
    engine._runs_by_itself = True
    start(lambda: engine).add(greedy("a"))
    inbox.wait_until(lambda: inbox.finish_reason("a") is not None)
    assert len(inbox.deltas("a")) == 8
    # All but the first token and the last are told by the turn after theirs, which had nothing.
    assert sum(not deltas for deltas in inbox.hand_overs) >= 6


def test_the_engine_is_made_and_runs_on_one_thread(start: Start, inbox: Inbox) -> None:
    names: list[str] = []

    def make() -> Engine:
        names.append(threading.current_thread().name)
        return make_engine(load(qwen2))

    start(make)
    assert names == ["engine"]


def test_only_a_sequence_that_cannot_run_ends_with_an_error(start: Start, inbox: Inbox) -> None:
    thread = start(lambda: make_engine(load(qwen2)))
    thread.add(SequenceRequest("bad", (), ENDLESS))
    thread.add(greedy("good"))
    inbox.wait_until(lambda: bool(inbox.finish_reason("bad") and inbox.finish_reason("good")))
    assert "empty" in (inbox.deltas("bad")[-1].error or "")
    assert thread.is_alive


def test_an_abort_updates_the_stats_even_if_nothing_runs(start: Start, inbox: Inbox) -> None:
    gate = Gate()
    thread = start(lambda: gate.engine)
    thread.add(SequenceRequest("a", (60,), ENDLESS))
    assert gate.is_reached.wait(DEADLINE_S)
    thread.abort("a")
    gate.may_go_on.set()
    # The step's hand-over has a delta; the abort's, which follows, has none.
    inbox.wait_until(lambda: bool(inbox.hand_overs) and inbox.hand_overs[-1] == [])
    assert thread.stats.num_running == 0
    assert inbox.finish_reason("a") is None


def test_a_sequence_aborted_before_it_reaches_the_engine_never_runs(
    start: Start, inbox: Inbox
) -> None:
    gate = Gate()
    thread = start(lambda: gate.engine)
    thread.add(greedy("first", max_tokens=2))
    assert gate.is_reached.wait(DEADLINE_S)
    thread.add(greedy("second"))
    thread.abort("second")
    gate.may_go_on.set()
    inbox.wait_until(lambda: inbox.finish_reason("first") is not None)
    inbox.wait_until(lambda: thread.stats == gate.engine.stats)
    assert inbox.deltas("second") == []
    assert not gate.engine.has_work


class Panic(BaseException):
    """Stands in for a Rust panic, which is not an Exception."""


@pytest.mark.parametrize("error", [MemoryError("the device is gone"), Panic("the device is gone")])
def test_when_the_engine_dies_all_sequences_fail_even_those_still_queued(
    start: Start, inbox: Inbox, error: BaseException
) -> None:
    gate = Gate()
    gate.error = error
    thread = start(lambda: gate.engine)
    thread.add(SequenceRequest("running", (60,), ENDLESS))
    assert gate.is_reached.wait(DEADLINE_S)
    thread.add(SequenceRequest("queued", (60,), ENDLESS))
    gate.may_go_on.set()
    for name in ("running", "queued"):
        inbox.wait_until(lambda name=name: inbox.finish_reason(name) is FinishReason.ERROR)  # type: ignore[misc] # bound now
    assert not thread.is_alive
    with pytest.raises(EngineDeadError) as caught:
        thread.add(greedy("late"))
    assert caught.value.__cause__ is error
    with pytest.raises(EngineDeadError):
        thread.abort("running")


def test_a_thread_that_hangs_is_abandoned_and_its_sequences_end(start: Start, inbox: Inbox) -> None:
    gate = Gate()
    gate.engine.max_step_s = 0.0
    thread = start(lambda: gate.engine)
    assert not thread.is_stuck
    thread.add(SequenceRequest("running", (60,), ENDLESS))
    assert gate.is_reached.wait(DEADLINE_S)
    thread.add(SequenceRequest("queued", (60,), ENDLESS))
    assert thread.is_stuck
    thread.abandon()
    for name in ("running", "queued"):
        assert inbox.finish_reason(name) is FinishReason.ERROR
        assert "hangs" in (inbox.deltas(name)[-1].error or "")
    with pytest.raises(EngineDeadError):
        thread.add(greedy("late"))
    thread.stop()  # does not wait for the step
    gate.may_go_on.set()
    thread._thread.join(DEADLINE_S)
    assert not thread._thread.is_alive()


def test_a_stop_ends_unfinished_sequences_and_may_be_repeated(start: Start, inbox: Inbox) -> None:
    gate = Gate()
    thread = start(lambda: gate.engine)
    thread.add(SequenceRequest("running", (60,), ENDLESS))
    assert gate.is_reached.wait(DEADLINE_S)
    thread.add(SequenceRequest("queued", (60,), ENDLESS))
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    gate.may_go_on.set()
    stopping.join(DEADLINE_S)
    assert not thread.is_alive
    for name in ("running", "queued"):
        assert inbox.finish_reason(name) is FinishReason.ERROR
        assert "stopped" in (inbox.deltas(name)[-1].error or "")
    thread.stop()


def test_a_hand_over_that_fails_ends_the_thread_with_a_log_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_called = threading.Event()

    def closed(_: Deltas) -> None:
        is_called.set()
        raise RuntimeError("Event loop is closed")

    thread = EngineThread(lambda: make_engine(load(qwen2)), closed)
    thread.start().result(DEADLINE_S)
    thread.add(greedy("a"))
    assert is_called.wait(DEADLINE_S)
    thread.stop()
    assert not thread.is_alive
    assert "could not be delivered" in caplog.text


def test_an_error_in_making_the_engine_reaches_all_waiters(inbox: Inbox) -> None:
    may_fail = threading.Event()

    def make() -> Engine:
        assert may_fail.wait(DEADLINE_S)
        raise ValueError("no such model")

    thread = EngineThread(make, inbox)
    engine = thread.start()
    thread.add(greedy("early"))
    may_fail.set()
    with pytest.raises(ValueError, match="no such model"):
        engine.result(DEADLINE_S)
    assert inbox.finish_reason("early") is FinishReason.ERROR
    assert not thread.is_alive
