import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.contract.errors import (
    GenerationAbortedError,
    GenerationFailedError,
    InvalidRequestError,
    OverloadedError,
    PoolingFailedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.generation import (
    PROBATION_TOKENS_AGAIN,
    GenerationRequest,
    RequestGroup,
    TokenizeRequest,
)
from deployments.contract.output import FinishReason, TextDelta
from deployments.contract.pooling import PoolingRequest
from deployments.contract.sampling_params import SamplingParams
from serve_app.backends.replicas.backend import DescribeRequest, DetokenizeRequest
from serve_app.backends.replicas.replica_errors import (
    LostAfterStartError,
    NoReplicaError,
    ReplicaStoppedError,
)
from serve_app.backends.streams.deadlines import Deadlines
from serve_app.backends.streams.failover import Failover
from serve_app.backends.streams.retries import FailoverLimits
from serve_app.config import LimitsConfig
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from serve_app.http.stream_notices import Notice
from tests.serve_app.backends.fake_replicas import GONE, Classifiers, Fate, Replicas
from tests.serve_app.read_stream import read_to_end
from tests.stopped_clock import Clock, settle

GROUP = RequestGroup("g", 3, is_first=True)
REQUEST = GenerationRequest("r", "hi", SamplingParams(max_tokens=6), group=GROUP)
TEXTS = PoolingRequest("r", ("hi",))
# No pause of the machine is as long as this patience.
FAST = FailoverLimits(timeout_s=30, first_backoff_s=0, max_backoff_s=0, first_patience_s=10)
IMPATIENT = replace(FAST, timeout_s=0.02, first_backoff_s=0.001, max_backoff_s=0.001)
UNDISTURBED = TextDelta(
    tuple(range(100, 106)), "<0><1><2><3><4><5>", FinishReason.LENGTH, num_cached_tokens=3
)
STOPPED = ReplicaStoppedError("stopped")
ABORTED = GenerationAbortedError("aborted")


def model(replicas: Replicas, limits: FailoverLimits = FAST) -> Failover:
    return Failover(replicas, limits)


async def answer(
    replicas: Replicas, request: GenerationRequest = REQUEST, limits: FailoverLimits = FAST
) -> TextDelta:
    """Return the whole answer of a model whose replicas meet their fates."""
    async with asyncio.timeout(30):
        stream = await model(replicas, limits).send(request)
        assert (stream.accepted.num_prompt_tokens, stream.accepted.reasoning) == (
            7,
            PromptReasoning.BEGUN,
        )
        whole = await read_to_end(stream)
    assert (replicas.num_open, replicas.num_opening) == (0, 0)
    return whole


@asynccontextmanager
async def recorded() -> AsyncIterator[RequestRecord]:
    record = RequestRecord("r", "POST", lambda: 0.0, 0.0)
    token = CURRENT_RECORD.set(record)
    try:
        yield record
    finally:
        CURRENT_RECORD.reset(token)


def may_be_death(fate: Fate) -> bool:
    """Return whether a stream that meets this fate may be suspected of it."""
    return fate.opening_error is None and fate.error in (None, GONE)


fates = st.lists(
    st.builds(
        Fate,
        num_tokens=st.integers(1, 4),
        error=st.sampled_from([None, GONE, STOPPED, ABORTED]),
        num_together=st.integers(1, 4),
    )
    | st.builds(Fate, opening_error=st.sampled_from([STOPPED, ABORTED])),
    max_size=8,
).filter(lambda each: sum(map(may_be_death, each)) <= 2)


@given(fates)
async def test_an_answer_is_the_undisturbed_one_wherever_its_replicas_are_lost(
    each: list[Fate],
) -> None:
    assert await answer(Replicas(fates=each)) == UNDISTURBED


@pytest.mark.parametrize("num_tokens", range(6))
async def test_a_stream_goes_on_after_the_tokens_that_it_has_passed_on(num_tokens: int) -> None:
    replicas = Replicas(fates=[Fate(num_tokens)])
    whole = await answer(replicas)
    assert whole == replace(UNDISTURBED, num_cached_tokens=3)
    first, second = replicas.requests
    assert first == REQUEST
    assert second == replace(
        REQUEST,
        generated_token_ids=tuple(range(100, 100 + num_tokens)),
        is_resumed=True,
        fingerprint="fp_fake",
        num_deaths=int(num_tokens == 0),
        group=None,
    )


async def test_an_abort_that_comes_with_tokens_keeps_them() -> None:
    replicas = Replicas(fates=[Fate(2, error=ABORTED, num_together=9)])
    assert await answer(replicas) == UNDISTURBED
    assert replicas.requests[1].generated_token_ids == (100, 101)
    assert replicas.requests[1].num_deaths == 0


async def test_a_replica_that_dies_after_the_last_delta_is_no_loss() -> None:
    replicas = Replicas(fates=[Fate(None, error=GONE)])
    stream = await model(replicas).send(REQUEST)
    deltas = [delta async for found in stream for delta in found]
    assert TextDelta.join(deltas) == UNDISTURBED
    with pytest.raises(StopAsyncIteration):
        await anext(aiter(stream))
    assert len(replicas.requests) == 1


async def test_an_opening_is_retried_until_a_replica_takes_it() -> None:
    replicas = Replicas(fates=[Fate(opening_error=STOPPED)] * 20)
    async with recorded() as record:
        assert await answer(replicas) == UNDISTURBED
    assert len(replicas.requests) == 21
    assert all(request == REQUEST for request in replicas.requests)
    assert record.num_moves == 1


async def test_a_request_that_was_not_accepted_is_not_resumed() -> None:
    replicas = Replicas(fates=[Fate(opening_error=GONE)])
    assert await answer(replicas) == UNDISTURBED
    assert replicas.requests[1] == replace(REQUEST, num_deaths=1)


@pytest.mark.parametrize(
    "error",
    [InvalidRequestError("no"), GenerationFailedError("no"), OverloadedError("full"),
     RaystreamError("no"), NoReplicaError("none")],
)  # fmt: skip
async def test_a_refusal_is_final(error: RaystreamError) -> None:
    replicas = Replicas(fates=[Fate(opening_error=error)])
    with pytest.raises(type(error)):
        await model(replicas).send(REQUEST)
    assert len(replicas.requests) == 1


async def test_an_error_of_the_sequence_is_final() -> None:
    replicas = Replicas(fates=[Fate(2, error=GenerationFailedError("bad logits"))])
    stream = await model(replicas).send(REQUEST)
    with pytest.raises(GenerationFailedError, match="bad logits"):
        await read_to_end(stream)
    assert (len(replicas.requests), replicas.num_open) == (1, 0)


@pytest.mark.parametrize("error", [OverloadedError("full"), NoReplicaError("none")])
async def test_an_accepted_answer_waits_where_a_new_request_is_refused(
    error: RaystreamError,
) -> None:
    replicas = Replicas(fates=[Fate(2), *[Fate(opening_error=error)] * 5])
    assert await answer(replicas) == UNDISTURBED
    assert len(replicas.requests) == 7


async def test_a_refusal_of_a_resumed_request_s_kind_ends_the_stream() -> None:
    replicas = Replicas(fates=[Fate(2), Fate(opening_error=InvalidRequestError("another model"))])
    stream = await model(replicas).send(REQUEST)
    with pytest.raises(InvalidRequestError, match="another model"):
        await read_to_end(stream)
    assert replicas.num_open == 0


async def test_an_answer_moves_a_limited_number_of_times() -> None:
    limits = replace(FAST, max_moves=3)
    replicas = Replicas(fates=[Fate(1, error=STOPPED)] * 4)
    stream = await model(replicas, limits).send(REQUEST)
    with pytest.raises(ReplicaUnavailableError, match="lost 4 replicas") as caught:
        await read_to_end(stream)
    assert caught.value.retry_after_s
    assert (len(replicas.requests), replicas.num_open) == (4, 0)
    assert await answer(Replicas(fates=[Fate(1, error=STOPPED)] * 3), limits=limits) == UNDISTURBED


@pytest.mark.parametrize("never", [asyncio.Event(), None])
async def test_no_replica_in_time_ends_the_stream_and_says_when_to_come_back(
    never: asyncio.Event | None,
) -> None:
    fate = Fate(opening_error=GONE, waits_for=never)
    replicas = Replicas(fates=[Fate(2), *[fate] * 1000])
    stream = await model(replicas, IMPATIENT).send(REQUEST)
    with pytest.raises(ReplicaUnavailableError, match=r"limits\.failover_timeout_s") as caught:
        await read_to_end(stream)
    assert caught.value.retry_after_s
    assert (replicas.num_open, replicas.num_opening) == (0, 0)


async def test_a_lost_stream_waits_for_as_long_as_the_slowest_start_and_the_file_says_the_least(
    advance: Clock,
) -> None:
    opens = asyncio.Event()
    replicas = Replicas(fates=[Fate(1), Fate(waits_for=opens)])
    replicas.start_s = 100.0
    told = Failover(replicas, replace(IMPATIENT, first_patience_s=1000))
    reading = asyncio.ensure_future(read_to_end(await told.send(REQUEST)))
    await replicas.opens.wait()
    advance(199)
    await settle()
    assert not reading.done()
    opens.set()
    assert await reading == UNDISTURBED


async def test_a_wait_that_follows_the_slowest_start_ends_and_says_so(advance: Clock) -> None:
    replicas = Replicas(fates=[Fate(1), Fate(waits_for=asyncio.Event())])
    replicas.start_s = 100.0
    limits = replace(IMPATIENT, first_patience_s=1000)
    reading = asyncio.ensure_future(read_to_end(await model(replicas, limits).send(REQUEST)))
    await replicas.opens.wait()
    advance(201)
    with pytest.raises(ReplicaUnavailableError, match=r"200 s \(twice its slowest start\)"):
        await reading


async def test_an_error_says_why_no_replica_will_run() -> None:
    async def why_none() -> NoReplicaError:
        return NoReplicaError.of("m", "there is no such folder")

    none = Fate(opening_error=NoReplicaError("none"))
    replicas = Replicas(fates=[none, Fate(2), *[none] * 1000])
    backend = Failover(replicas, IMPATIENT, why_none)
    told = "The model 'm' has failed, and no replica of it runs: there is no such folder"
    with pytest.raises(NoReplicaError, match=f"^{told}$"):
        await backend.send(REQUEST)
    stream = await backend.send(REQUEST)
    with pytest.raises(ReplicaUnavailableError, match=rf"failover_timeout_s\)\. {told}$"):
        await read_to_end(stream)


async def test_a_new_request_may_wait_longer_than_a_lost_one(advance: Clock) -> None:
    opens = asyncio.Event()
    replicas = Replicas(fates=[Fate(waits_for=opens)])
    asking = asyncio.ensure_future(model(replicas, IMPATIENT).send(REQUEST))
    await replicas.opens.wait()
    advance(3 * IMPATIENT.timeout_s)
    await settle()
    assert not asking.done()
    opens.set()
    assert await read_to_end(await asking) == UNDISTURBED


async def test_the_failover_limit_and_not_the_stall_limit_ends_the_wait_for_a_replica() -> None:
    replicas = Replicas(fates=[Fate(2), Fate(waits_for=asyncio.Event())])
    limits = LimitsConfig(stall_timeout_s=0.005)
    stream = await Deadlines(model(replicas, IMPATIENT), limits).send(REQUEST)
    with pytest.raises(ReplicaUnavailableError, match=r"limits\.failover_timeout_s"):
        await read_to_end(stream)
    assert (replicas.num_open, replicas.num_opening) == (0, 0)


async def test_a_suspect_that_kills_a_second_replica_fails_and_is_not_sent_again() -> None:
    replicas = Replicas(fates=[Fate(0), Fate(0)])
    stream = await model(replicas).send(REQUEST)
    with pytest.raises(GenerationFailedError, match="2 replicas"):
        await read_to_end(stream)
    assert [request.num_deaths for request in replicas.requests] == [0, 1]
    assert replicas.num_open == 0


async def test_a_suspect_that_dies_before_it_is_accepted_is_to_blame_if_it_had_started() -> None:
    started = Fate(opening_error=LostAfterStartError("gone"))
    for first in (Fate(0), Fate(opening_error=GONE)):
        replicas = Replicas(fates=[first, started])
        with pytest.raises(GenerationFailedError, match="2 replicas"):
            await read_to_end(await model(replicas).send(REQUEST))
        assert len(replicas.requests) == 2


async def test_a_suspect_that_still_waited_for_its_turn_is_not_to_blame() -> None:
    replicas = Replicas(fates=[Fate(0), *[Fate(opening_error=GONE)] * 5])
    assert await answer(replicas) == replace(UNDISTURBED, num_cached_tokens=3)
    assert [request.num_deaths for request in replicas.requests] == [0, *[1] * 6]


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_text_that_has_begun_is_a_suspect_only_from_its_second_death_on(
    num_tokens: int,
) -> None:
    replicas = Replicas(fates=[Fate(1), Fate(num_tokens)])
    assert await answer(replicas) == UNDISTURBED
    assert [request.num_deaths for request in replicas.requests] == [0, 0, 2]


@pytest.mark.parametrize("num_tokens", [0, PROBATION_TOKENS_AGAIN - 1])
async def test_a_text_that_kills_a_third_replica_in_its_trial_fails(num_tokens: int) -> None:
    replicas = Replicas(200, [Fate(40), Fate(1), Fate(num_tokens)])
    stream = await model(replicas).send(REQUEST)
    with pytest.raises(GenerationFailedError, match="3 replicas"):
        await read_to_end(stream)
    assert (len(replicas.requests), replicas.num_open) == (3, 0)


async def test_a_text_that_has_passed_its_trial_is_no_suspect() -> None:
    replicas = Replicas(200, [Fate(1), Fate(1), *[Fate(PROBATION_TOKENS_AGAIN)] * 4])
    await answer(replicas)
    assert [request.num_deaths for request in replicas.requests] == [0, 0, 2, 0, 0, 0, 0]


async def test_a_lost_stream_is_offered_again_if_a_replica_does_not_answer() -> None:
    replicas = Replicas(fates=[Fate(2), *[Fate(waits_for=asyncio.Event())] * 3])
    limits = replace(FAST, first_patience_s=0.001)
    assert await answer(replicas, limits=limits) == UNDISTURBED
    assert len(replicas.requests) == 5


async def test_a_request_that_has_lost_no_replica_waits_as_long_as_it_takes(advance: Clock) -> None:
    comes_up = asyncio.Event()
    replicas = Replicas(fates=[Fate(waits_for=comes_up)])
    asking = asyncio.ensure_future(answer(replicas, limits=FAST))
    await replicas.opens.wait()
    advance(2 * FAST.first_patience_s)
    await settle()
    comes_up.set()
    assert await asking == UNDISTURBED
    assert len(replicas.requests) == 1


@pytest.mark.parametrize("kind", [Fate(0, error=STOPPED), Fate(0, error=ABORTED)])
async def test_replicas_that_stop_on_purpose_are_no_deaths(kind: Fate) -> None:
    replicas = Replicas(fates=[Fate(0), kind, kind, kind])
    assert await answer(replicas) == replace(UNDISTURBED, num_cached_tokens=3)
    assert [request.num_deaths for request in replicas.requests] == [0, 1, 1, 1, 1]


async def test_moves_and_waits_are_told_while_they_happen() -> None:
    comes_up = asyncio.Event()
    told: list[str] = []

    def note(notice: str) -> None:
        told.append(notice)
        if told.count(Notice.WAITING) == 3:
            comes_up.set()

    limits = replace(FAST, notice_interval_s=0.001)
    replicas = Replicas(fates=[Fate(2), Fate(waits_for=comes_up)])
    async with recorded() as record:
        record.on_notice = note
        assert await answer(replicas, limits=limits) == UNDISTURBED
    assert told[:3] == [Notice.WAITING] * 3
    assert told[-1] is Notice.MOVED
    assert told.count(Notice.MOVED) == record.num_moves == 1


async def test_closing_while_a_stream_moves_cancels_the_opening_and_ends_the_reader() -> None:
    replicas = Replicas(fates=[Fate(1), Fate(waits_for=asyncio.Event())])
    stream = await model(replicas).send(REQUEST)
    deltas = aiter(stream)
    await anext(deltas)
    reading = asyncio.ensure_future(anext(deltas, None))
    await replicas.opens.wait()
    assert replicas.num_opening == 1
    await stream.aclose()
    assert (replicas.num_open, replicas.num_opening) == (0, 0)
    assert await reading is None
    await stream.aclose()


async def test_200_readers_that_leave_at_random_moments_leave_nothing_open() -> None:
    random_ = random.Random(7)
    up = asyncio.Event()
    lives = 0

    async def read(replicas: Replicas) -> None:
        stream = await model(replicas, replace(FAST, notice_interval_s=0.001)).send(REQUEST)
        try:
            async for _ in stream:
                await asyncio.sleep(0)
        finally:
            await stream.aclose()

    for _ in range(200):
        fates = [
            Fate(
                random_.randrange(3),
                error=random_.choice([STOPPED, None, ABORTED]),
                opening_error=random_.choice([None, None, STOPPED]),
                waits_for=random_.choice([None, None, None, up]),
            )
            for _ in range(6)
        ]
        replicas = Replicas(fates=[fates[0], *fates])
        reading = asyncio.ensure_future(read(replicas))
        for _ in range(random_.randrange(60)):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        lives += reading.cancelled()
        assert (replicas.num_open, replicas.num_opening) == (0, 0)
    assert lives > 100, "most readers must leave before their stream has ended"


async def test_a_classification_is_repeated_until_a_replica_answers() -> None:
    replicas = Classifiers(GONE, STOPPED, GONE, OverloadedError("full"))
    async with recorded() as record:
        await Failover(replicas, FAST).send(TEXTS)
    assert replicas.requests[0] == TEXTS
    assert [request.num_deaths for request in replicas.requests] == [0, 1, 1, 1, 1]
    assert record.num_moves == 1


async def test_texts_that_kill_two_replicas_fail() -> None:
    replicas = Classifiers(GONE, LostAfterStartError("gone"))
    with pytest.raises(PoolingFailedError, match="2 replicas"):
        await Failover(replicas, FAST).send(TEXTS)
    assert len(replicas.requests) == 2


READS: dict[str, Callable[[Failover], Awaitable[object]]] = {
    "describe": lambda model: model.send(DescribeRequest()),
    "tokenize": lambda model: model.send(TokenizeRequest("hi")),
    "detokenize": lambda model: model.send(DetokenizeRequest((1,))),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
async def test_a_read_is_repeated_when_its_replica_is_lost(
    read: Callable[[Failover], Awaitable[object]],
) -> None:
    for errors in ([GONE], [STOPPED] * 9, [STOPPED, GONE, STOPPED]):
        replicas = Replicas(read_errors=errors)
        assert await read(model(replicas)) == await read(model(Replicas()))
        assert replicas.num_reads == len(errors) + 1


@pytest.mark.parametrize("read", READS.values(), ids=READS)
async def test_a_read_kills_two_replicas_at_most(
    read: Callable[[Failover], Awaitable[object]],
) -> None:
    replicas = Replicas(read_errors=[GONE] * 9)
    with pytest.raises(ReplicaUnavailableError, match="2 replicas"):
        await read(model(replicas))
    assert replicas.num_reads == 2


async def test_a_classifier_s_description_is_asked_for_again_when_its_replica_is_lost() -> None:
    replicas = Classifiers()
    replicas.read_errors = [STOPPED, GONE]
    found = await Failover(replicas, FAST).send(DescribeRequest())
    assert found == await Classifiers().describe()


@pytest.mark.parametrize("error", [OverloadedError("full"), InvalidRequestError("no")])
async def test_a_refused_classification_is_not_repeated(error: RaystreamError) -> None:
    replicas = Classifiers(error)
    with pytest.raises(type(error)):
        await Failover(replicas, FAST).send(TEXTS)
    assert len(replicas.requests) == 1


async def test_a_classification_without_a_replica_in_time_says_when_to_come_back() -> None:
    replicas = Classifiers(*[STOPPED] * 1000)
    with pytest.raises(ReplicaUnavailableError) as caught:
        await Failover(replicas, IMPATIENT).send(TEXTS)
    assert caught.value.retry_after_s


def test_backoffs_double_up_to_a_limit() -> None:
    backoffs_s = FailoverLimits(90).backoffs_s()
    assert [next(backoffs_s) for _ in range(7)] == [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1]
