"""A sequence in the engine and out of it: what the engine gets, and what its client does."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from deployments.contract.errors import GenerationAbortedError, ReplicaUnavailableError
from deployments.contract.generation import GenerationRequest
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.grammar.matcher import FreeMatcher, GrammarCompiler, ReasoningMatcher
from deployments.engine.scheduling.sequence import SequenceRequest
from deployments.generator.admission import engine_run
from deployments.generator.admission.engine_run import PARKED, EngineRun
from deployments.generator.text_engine import Take, TextEngine
from tests.engine.grammar.test_matcher import ENUM, MARKS, ids_of, json_grammar
from tests.engine.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

PARAMS = SamplingParams()


class FakeEngine:
    """Notes what it gets, and hands over what a test gives it."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.got: list[SequenceRequest] = []
        self.takes: dict[str, Take] = {}

    def unique_id(self, name: str) -> str:
        return f"{name}-{len(self.got)}"

    @contextmanager
    def running(self, sequence: SequenceRequest, take: Take) -> Iterator[None]:
        if self.error is not None:
            raise self.error
        self.got.append(sequence)
        self.takes[sequence.sequence_id] = take
        try:
            yield
        finally:
            del self.takes[sequence.sequence_id]

    def give(self, *token_ids: int, **delta: Any) -> None:
        (take,) = self.takes.values()
        take(TextDelta(token_ids, "", **delta))


class Client:
    """Makes a run, and notes what comes out of it."""

    def __init__(
        self,
        sequence: SequenceRequest | None = None,
        *,
        may_park: bool = True,
        is_parked: bool = False,
        num_deaths: int = 0,
    ) -> None:
        self.engine = FakeEngine()
        self.deltas: list[TextDelta] = []
        self.num_begun = self.num_late = self.num_flushed = 0
        self.late = asyncio.Event()
        self.sequence = sequence or SequenceRequest("r-first", (1, 2, 3), PARAMS)
        request = GenerationRequest(
            "r", "hi", PARAMS, may_park=may_park, is_parked=is_parked, num_deaths=num_deaths
        )
        self.run = EngineRun(
            cast("TextEngine", self.engine),
            request,
            self.sequence,
            self.deltas.append,
            flush=self.note_flushed,
            on_begun=self.note_begun,
            on_late=self.late.set,
        )

    def note_flushed(self) -> None:
        self.num_flushed += 1

    def note_begun(self) -> None:
        self.num_begun += 1

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


@pytest.mark.parametrize("goes_first", [False, True])
def test_the_engine_gets_the_sequence_as_it_is_at_first(goes_first: bool) -> None:
    client = Client()
    client.run.enter(goes_first=goes_first)
    assert client.engine.got == [replace(client.sequence, goes_first=goes_first)]


def test_a_sequence_goes_on_behind_what_has_gone_out_and_is_counted_once() -> None:
    given = SequenceRequest("r-first", (1, 2, 3), PARAMS, (7,), is_resumed=True)
    client = Client(given)
    client.run.enter(goes_first=True)
    client.engine.give(8, 9, num_cached_tokens=2)
    client.run.leave()
    assert not client.run.is_in
    assert not client.engine.takes
    client.run.leave()
    client.run.enter(goes_first=False)
    assert client.run.is_in
    back = client.engine.got[1]
    assert back == replace(
        given, sequence_id="r-1", generated_token_ids=(7, 8, 9), is_return=True, goes_first=False
    )
    client.engine.give(10, num_cached_tokens=3)
    client.engine.give(11, num_cached_tokens=0, finish_reason=FinishReason.STOP)
    assert client.token_ids == [8, 9, 10, 11]
    assert [delta.num_cached_tokens for delta in client.deltas] == [2, 0, 0]
    assert client.num_begun == 2


@pytest.mark.parametrize(("at_first", "told"), [(1, 1), (None, 3)])
def test_what_a_sequence_computed_itself_before_it_left_does_not_count_as_cached(
    at_first: int | None, told: int
) -> None:
    client = Client()
    for num_cached_tokens in (at_first, 3):
        client.run.enter(goes_first=False)
        beginning = client.engine.got[-1].beginning
        assert beginning is not None
        assert not client.run.has_begun
        beginning.num_cached_tokens = num_cached_tokens
        assert client.run.has_begun == (num_cached_tokens is not None)
        if len(client.engine.got) == 1:
            client.run.leave()
    client.engine.give(8, num_cached_tokens=3)
    assert [delta.num_cached_tokens for delta in client.deltas] == [told]


def test_what_the_engine_begins_with_while_the_sequence_leaves_counts_as_begun_first() -> None:
    client = Client()
    client.run.enter(goes_first=False)
    first = client.engine.got[-1].beginning
    client.run.leave()
    assert first is not None
    first.num_cached_tokens = 1  # by a step that ran when it left
    client.run.enter(goes_first=False)
    assert not client.run.has_begun
    second = client.engine.got[-1].beginning
    assert second is not None
    second.num_cached_tokens = 3
    client.engine.give(8, num_cached_tokens=3)
    assert [delta.num_cached_tokens for delta in client.deltas] == [1]


def test_log_probabilities_of_the_prompt_go_on_behind_those_that_have_gone_out() -> None:
    client = Client()
    client.run.enter(goes_first=False)
    client.engine.give(prompt_logprobs=((None, None), (None,)))
    client.run.leave()
    client.run.enter(goes_first=True)
    assert client.engine.got[1].num_prompt_logprobs == 3


def test_a_matcher_is_compiled_once_and_never_reads_what_has_not_gone_out() -> None:
    compiler = GrammarCompiler(byte_tokenizer(), VOCAB_SIZE, (EOS_TOKEN_ID,))
    grammar = json_grammar(ENUM)
    params = SamplingParams(grammar=grammar)
    matcher = compiler.compile(grammar)
    client = Client(SequenceRequest("r-first", (1,), params, matcher=matcher))
    expected = compiler.compile(grammar)
    gone_out = iter(ids_of('"re'))
    for turn in range(4):
        client.run.enter(goes_first=False)
        held = client.engine.got[turn].matcher
        assert held is not None
        assert held is not matcher
        assert held.bitmask().equal(expected.bitmask()), turn
        token_id = next(gone_out, None)
        if token_id is None:
            break
        client.engine.give(token_id)
        expected.advance(token_id)
        held.advance(token_id)
        held.advance(next(iter(ids_of("g"))))  # the engine is a token ahead when it leaves
        client.run.leave()
    assert turn == 3


def test_reasoning_is_copied_with_what_is_left_of_its_budget() -> None:
    matcher = ReasoningMatcher(
        FreeMatcher(VOCAB_SIZE), replace(MARKS, has_begun=True, max_tokens=2), ()
    )
    matcher.advance(5)
    copied = matcher.copy()
    copied.advance(5)
    assert copied.bitmask().count_nonzero() == 1, "only the end of the reasoning may come"
    assert matcher.bitmask().count_nonzero() > 1


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (GenerationAbortedError("stopped"), None),
        (ReplicaUnavailableError("it has failed"), "it has failed"),
    ],
)
def test_a_sequence_that_the_ended_engine_does_not_take_goes_on_elsewhere(
    error: Exception, told: str | None
) -> None:
    client = Client()
    client.run.enter(goes_first=False)
    client.run.leave()
    client.engine.error = error
    client.run.enter(goes_first=True)
    assert client.deltas == [TextDelta((), "", FinishReason.ABORT, told)]
    assert client.num_flushed == 1
    assert not client.run.is_in
    client.engine.error = None
    client.run.enter(goes_first=True)
    client.run.park()
    assert len(client.engine.got) == len(client.deltas) == 1, "it is over"


async def test_a_displaced_sequence_is_late_unless_it_has_its_turn_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_run, "PARK_AFTER_S", 0)
    client = Client()
    client.run.enter(goes_first=False)
    client.engine.give(8)
    assert not client.run.may_park, "the engine computes it"
    client.run.note_turn(is_running=False)
    client.run.note_turn(is_running=True)
    client.run.note_turn(is_running=False)
    client.run.leave()
    async with asyncio.timeout(10):
        await client.late.wait()
    assert client.run.may_park
    client.run.park()
    assert client.deltas[-1] == PARKED
    assert (client.num_flushed, client.engine.takes) == (1, {})
    assert not client.run.may_yield


async def test_a_run_that_is_late_and_not_parked_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_run, "PARK_AFTER_S", 0)
    client = Client(is_parked=True)
    client.run.note_turn(is_running=False)
    for _ in range(2):
        client.late.clear()
        async with asyncio.timeout(10):
            await client.late.wait()
    client.run.park()
    assert client.run._timer is None


async def test_who_begins_in_time_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_run, "PARK_AFTER_S", 0)
    client = Client(is_parked=True)
    client.run.note_turn(is_running=False)
    client.run.enter(goes_first=False)
    client.engine.give(8)
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(0, over.set)  # behind the timer, had it not been stopped
    async with asyncio.timeout(10):
        await over.wait()
    assert not client.late.is_set()


def test_a_suspect_does_not_yield_and_who_is_not_taken_back_is_not_parked() -> None:
    assert not Client(num_deaths=1).run.may_yield
    assert not Client(may_park=False).run.may_park
    assert Client().run.may_park


def test_a_closed_run_gives_nothing_more() -> None:
    client = Client()
    client.run.enter(goes_first=False)
    client.run.close()
    assert not client.engine.takes
    client.run.park()
    client.run.enter(goes_first=False)
    assert (client.deltas, len(client.engine.got)) == ([], 1)
