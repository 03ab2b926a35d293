import asyncio
from collections.abc import Callable
from itertools import cycle
from typing import TYPE_CHECKING, Any, cast

import pytest
from ray.exceptions import ActorDiedError

from deployments.contract import (
    Classification,
    ClassificationRequest,
    Classified,
    ClassifierDescription,
    Refused,
)
from deployments.errors import (
    ContextLengthExceededError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
    TotalTimeoutError,
)
from serve_app.access_log import AccessLogMiddleware
from serve_app.classification_backend import (
    HandleClassificationBackend,
    TimelyClassificationBackend,
)
from serve_app.known_replicas import MAX_ATTEMPTS
from serve_app.request_id import RequestIdMiddleware
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fake_classifier import FakeClassifier
from tests.serve_app.test_backends import ERRORS, FakeMethod, FakeResponse, dual_error

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from starlette.types import Receive, Scope, Send

REQUEST = ClassificationRequest("r", ("hi",))
ANSWER = (Classification((0.25, 0.75), 3),)
DESCRIPTION = ClassifierDescription("c", 1, 8, ("a", "b"), False)


class FakeHandle:
    """The part of `DeploymentHandle` that the backend uses; its calls get these answers in turn."""

    def __init__(self, *answers: object) -> None:
        self.calls: list[FakeResponse] = []
        self._answers = cycle(answers)
        self.describe = FakeMethod(FakeResponse(DESCRIPTION))

    @property
    def classify(self) -> FakeMethod:
        self.calls.append(FakeResponse(next(self._answers)))
        return FakeMethod(self.calls[-1])

    @property
    def ping(self) -> FakeMethod:
        return self.classify


def backend(
    *answers: object, count_refusal: Callable[[], object] = lambda: None
) -> tuple[HandleClassificationBackend, FakeHandle]:
    handle = FakeHandle(*answers)
    theirs = cast("DeploymentHandle[Any]", handle)
    return HandleClassificationBackend(theirs, count_refusal), handle


async def test_a_replica_s_answer_is_passed_on() -> None:
    model, handle = backend(Classified(ANSWER, "a"))
    assert await model.classify(REQUEST) == ANSWER
    assert await model.describe() == DESCRIPTION
    assert not handle.calls[0].is_cancelled


async def test_a_refusal_by_the_only_replica_is_told_at_once() -> None:
    model, handle = backend(Refused("full", 7, "a"))
    for num_calls in (1, 2, 3):
        with pytest.raises(OverloadedError, match="full") as caught:
            await model.classify(REQUEST)
        assert caught.value.retry_after_s == 7
        assert len(handle.calls) == num_calls


async def test_what_one_replica_refuses_is_shown_to_another() -> None:
    model, handle = backend(Classified(ANSWER, "b"), Refused("full", 1, "a"))
    for num_calls in (1, 3, 5):
        assert await model.classify(REQUEST) == ANSWER
        assert len(handle.calls) == num_calls


async def test_a_request_counts_as_refused_once_and_only_if_nobody_takes_it() -> None:
    counted: list[None] = []
    model, handle = backend(
        Refused("full", 1, "a"),
        Refused("full", 1, "b"),
        Classified(ANSWER, "c"),
        count_refusal=lambda: counted.append(None),
    )
    with pytest.raises(OverloadedError):
        await model.classify(REQUEST)  # only "a" is known by now
    assert await model.classify(REQUEST) == ANSWER
    assert (len(handle.calls), len(counted)) == (3, 1)
    handle._answers = cycle([Refused("full", 1, name) for name in "abc"])
    with pytest.raises(OverloadedError):
        await model.classify(REQUEST)
    assert (len(handle.calls), len(counted)) == (3 + MAX_ATTEMPTS, 2)


async def test_what_all_refuse_is_told_the_least_time_and_asked_no_longer() -> None:
    waits_s = {"a": 9, "b": 4, "c": 6, "d": 5, "e": 8}
    model, handle = backend(*(Refused("full", waits_s[name], name) for name in waits_s))
    for _ in range(2):
        with pytest.raises(OverloadedError):
            await model.classify(REQUEST)
    handle.calls.clear()
    with pytest.raises(OverloadedError) as caught:
        await model.classify(REQUEST)
    assert caught.value.retry_after_s == 4
    assert len(handle.calls) == MAX_ATTEMPTS


@pytest.mark.parametrize(("theirs", "ours"), ERRORS)
async def test_ray_s_errors_become_ours(theirs: Exception, ours: type[RaystreamError]) -> None:
    model, handle = backend(theirs)
    with pytest.raises(ours) as caught:
        await model.classify(REQUEST)
    assert type(caught.value) is ours
    assert "secret" not in str(caught.value)
    assert handle.calls[0].is_cancelled


async def test_which_text_is_to_blame_survives_the_journey() -> None:
    model, _ = backend(dual_error(ContextLengthExceededError("too long", "input[3]")))
    with pytest.raises(ContextLengthExceededError) as caught:
        await model.classify(REQUEST)
    assert (str(caught.value), caught.value.param) == ("too long", "input[3]")


async def test_a_dead_replica_fails_a_ping() -> None:
    with pytest.raises(ReplicaUnavailableError):
        await backend(ActorDiedError())[0].ping()


async def test_a_client_that_leaves_cancels_the_replica_s_call() -> None:
    model, handle = backend(asyncio.Event())
    asked = asyncio.ensure_future(model.classify(REQUEST))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert handle.calls[0].is_cancelled


async def test_an_answer_that_is_late_is_an_error_and_its_call_is_cancelled() -> None:
    slow = FakeClassifier()
    slow.answers = asyncio.Event()
    with pytest.raises(TotalTimeoutError, match=r"0\.01 s \(limits\.total_timeout_s\)"):
        await TimelyClassificationBackend(slow, 0.01).classify(REQUEST)
    assert slow.is_cancelled


async def test_the_time_counts_from_the_request_s_arrival() -> None:
    slow = FakeClassifier()
    slow.answers = asyncio.Event()
    moments_s = iter([0.0, 100.0])

    async def surface(scope: "Scope", receive: "Receive", send: "Send") -> None:
        async with asyncio.timeout(20):
            with pytest.raises(TotalTimeoutError):
                await TimelyClassificationBackend(slow, 60).classify(REQUEST)

    app = AccessLogMiddleware(surface, now=lambda: next(moments_s, 100.0))
    async with AsgiCall(RequestIdMiddleware(app), "/", None) as call:
        await call.end()


async def test_a_model_that_loads_for_too_long_is_late() -> None:
    slow = FakeClassifier()
    slow.loaded = asyncio.Event()
    with pytest.raises(TotalTimeoutError, match="not loaded"):
        await TimelyClassificationBackend(slow, 0.01).describe()


@pytest.mark.parametrize("total_timeout_s", [None, 600])
async def test_what_comes_in_time_is_passed_on(total_timeout_s: float | None) -> None:
    model, timely = FakeClassifier(), TimelyClassificationBackend(FakeClassifier(), total_timeout_s)
    assert await timely.classify(REQUEST) == await model.classify(REQUEST)
    assert await timely.describe() == model.description


async def test_a_timeout_from_within_is_not_taken_for_ours() -> None:
    class Failing(FakeClassifier):
        async def classify(self, request: ClassificationRequest) -> tuple[Classification, ...]:
            raise TimeoutError("its own")

        async def describe(self) -> ClassifierDescription:
            raise TimeoutError("its own")

    timely = TimelyClassificationBackend(Failing(), 600)
    with pytest.raises(TimeoutError, match="its own"):
        await timely.classify(REQUEST)
    with pytest.raises(TimeoutError, match="its own"):
        await timely.describe()
