import asyncio
import re
from collections.abc import Sequence
from typing import cast

import httpx
import pytest
from starlette.types import Message

from deployments.contract.errors import GenerationFailedError, ReplicaUnavailableError
from serve_app.config import ApiKey
from serve_app.keys.ledger import KeyLedger, Verdict
from serve_app.middleware.rate_limits import RateLimitMiddleware, duration
from tests.offenders import for_each
from tests.serve_app.apps import ALICE, BOB, CHAT, JSON, bearer, client_of, make_app, question, ring
from tests.serve_app.asgi_call import AsgiCall
from tests.serve_app.fake_pooler import FakeClassifier
from tests.serve_app.fakes import HELLO, FakeBackend, Step
from tests.serve_app.keys.test_ledger import HandClock

pytestmark = [pytest.mark.in_time, pytest.mark.usefixtures("advance")]

HELLO_TOKENS = 7 + 5


class CountedLedger(KeyLedger):
    """Counts its calls."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        super().__init__(keys)
        self.num_asked = 0
        self.settled: list[int] = []
        self.told = asyncio.Event()

    async def admit(self, name: str, ticket: str) -> Verdict:
        self.num_asked += 1
        return await super().admit(name, ticket)

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        self.settled.append(num_tokens)
        await super().settle(name, ticket, num_tokens)
        self.told.set()


class SlowLedger(CountedLedger):
    """Receives a message, and acts on it only when released."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        super().__init__(keys)
        self.hears_begin, self.hears_end = asyncio.Event(), asyncio.Event()
        self.lets_admit, self.lets_settle = asyncio.Event(), asyncio.Event()

    async def admit(self, name: str, ticket: str) -> Verdict:
        self.hears_begin.set()
        await self.lets_admit.wait()
        return await super().admit(name, ticket)

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        self.hears_end.set()
        await self.lets_settle.wait()
        await super().settle(name, ticket, num_tokens)


class DeadLedger:
    """A ledger that can't be reached."""

    async def admit(self, name: str, ticket: str) -> Verdict:
        raise ReplicaUnavailableError("gone")

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        raise ReplicaUnavailableError("gone")


def ends(sent: list[Message]) -> bool:
    return bool(sent) and not sent[-1].get("more_body", True)


async def ask(client: httpx.AsyncClient, secret: str = ALICE, **fields: object) -> httpx.Response:
    return await client.post(CHAT, json=question(**fields), headers=bearer(secret))


async def test_beyond_its_requests_per_minute_a_key_gets_a_429_with_retry_after(
    backend: FakeBackend,
) -> None:
    keys = ring(requests_per_minute=2, tokens_per_minute=1000)
    async with client_of(make_app(backend, keys, KeyLedger(keys.limited, HandClock()))) as client:
        first, second, third = [await ask(client) for _ in range(3)]
        assert (await ask(client, BOB)).status_code == 200
    assert [first.status_code, second.status_code, third.status_code] == [200, 200, 429]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"] == "30s"
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert first.headers["x-ratelimit-remaining-tokens"] == "1000"
    assert second.headers["x-ratelimit-remaining-tokens"] == str(1000 - HELLO_TOKENS)
    assert third.headers["retry-after"] == "30"
    assert "x-should-retry" not in third.headers
    error = third.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "requests per minute" in error["message"]
    assert len(backend.requests) == 3


async def test_tokens_are_charged_as_reported_in_the_usage(backend: FakeBackend) -> None:
    keys = ring(tokens_per_minute=HELLO_TOKENS)
    async with client_of(make_app(backend, keys, KeyLedger(keys.limited, HandClock()))) as client:
        first, second = await ask(client), await ask(client)
    assert first.json()["usage"]["total_tokens"] == HELLO_TOKENS
    assert second.status_code == 429
    assert "tokens per minute" in second.json()["error"]["message"]
    assert second.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_several_answers_share_one_prompt(backend: FakeBackend) -> None:
    keys = ring(tokens_per_minute=1000)
    ledger = CountedLedger(keys.limited)
    async with client_of(make_app(backend, keys, ledger)) as client:
        usage = (await ask(client, n=3)).json()["usage"]
    assert usage["total_tokens"] == 7 + 3 * 5
    assert ledger.settled == [usage["total_tokens"]]


async def test_two_ingresses_admit_no_more_than_one(backend: FakeBackend) -> None:
    keys = ring(requests_per_minute=5)
    ledger = KeyLedger(keys.limited, HandClock())
    apps = [make_app(backend, keys, ledger) for _ in range(2)]
    async with client_of(apps[0]) as one, client_of(apps[1]) as other:
        answers = await asyncio.gather(*(ask(client) for client in (one, other) * 8))
    assert sorted(answer.status_code for answer in answers) == [200] * 5 + [429] * 11


async def test_a_stream_counts_until_it_ends_or_its_client_leaves() -> None:
    backend = FakeBackend([*HELLO[:1], asyncio.Event()])
    keys = ring(max_concurrent_streams=1)
    ledger = CountedLedger(keys.limited)
    app = make_app(backend, keys, ledger)
    async with (
        AsgiCall(app, CHAT, question(stream=True), headers=bearer(ALICE)) as call,
        client_of(app) as client,
    ):
        await call.wait_until(lambda: b"Hello" in call.body)
        refused = await ask(client)
        assert refused.status_code == 429
        assert "running" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        call.leave()
        await call.end()
        await asyncio.wait_for(ledger.told.wait(), 30)
        backend.steps = HELLO
        assert (await ask(client)).status_code == 200
    # The abandoned stream is charged for the tokens it had; the refused one is not charged.
    assert ledger.settled == [7 + 1, HELLO_TOKENS]


@pytest.mark.parametrize("steps", [HELLO, [*HELLO[:2], GenerationFailedError("broken")]])
@pytest.mark.parametrize("path", [CHAT, "/text-generation"])
async def test_a_request_is_settled_before_its_last_event(path: str, steps: list[Step]) -> None:
    keys = ring(max_concurrent_streams=1)
    ledger = CountedLedger(keys.limited)
    app = make_app(FakeBackend(steps), keys, ledger)
    body = question(stream=True) if path == CHAT else {"prompt": "Hello?"}
    async with AsgiCall(app, path, body, headers=bearer(ALICE)) as call:
        # OpenAI's clients stop reading here, and may send their next request at once.
        await call.wait_until(lambda: b"[DONE]" in call.body or b'"error"' in call.body)
        assert len(ledger.settled) == 1
        assert not call.sent[-1]["more_body"]


async def test_a_request_is_settled_before_its_last_byte(backend: FakeBackend) -> None:
    keys = ring(max_concurrent_streams=1)
    ledger = CountedLedger(keys.limited)
    app = make_app(backend, keys, ledger)
    async with AsgiCall(app, CHAT, question(stream=True), headers=bearer(ALICE)) as call:
        await call.wait_until(lambda: ends(call.sent))
        assert ledger.settled == [HELLO_TOKENS]
        await call.end()
    assert ledger.settled == [HELLO_TOKENS]


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_client_that_leaves_during_the_settlement_is_still_settled(
    backend: FakeBackend, is_cancelled: bool
) -> None:
    keys = ring(max_concurrent_streams=1)
    ledger = SlowLedger(keys.limited)
    ledger.lets_admit.set()
    app = make_app(backend, keys, ledger)
    async with AsgiCall(app, CHAT, question(stream=True), headers=bearer(ALICE)) as call:
        await asyncio.wait_for(ledger.hears_end.wait(), 30)
        assert b"[DONE]" not in call.body
        # An HTTP server sends a disconnect; Serve cancels the request.
        call.task.cancel() if is_cancelled else call.leave()
        await asyncio.wait([call.task], timeout=30)
        ledger.lets_settle.set()
        await asyncio.wait_for(ledger.told.wait(), 30)
    assert ledger.settled == [HELLO_TOKENS]
    async with client_of(app) as client:
        assert (await ask(client)).status_code == 200


async def test_a_client_that_leaves_before_it_is_admitted_holds_no_stream(
    backend: FakeBackend,
) -> None:
    keys = ring(max_concurrent_streams=1)
    ledger = SlowLedger(keys.limited)
    ledger.lets_settle.set()
    app = make_app(backend, keys, ledger)
    async with AsgiCall(app, CHAT, question(stream=True), headers=bearer(ALICE)) as call:
        await asyncio.wait_for(ledger.hears_begin.wait(), 30)
        call.task.cancel()
        await asyncio.wait([call.task], timeout=30)
        assert ledger.settled == [], "a request is settled only after it was admitted"
        ledger.lets_admit.set()
        await asyncio.wait_for(ledger.told.wait(), 30)
    assert ledger.settled == [0]
    async with client_of(app) as client:
        assert (await ask(client)).status_code == 200


async def test_a_key_without_limits_never_waits_for_the_ledger(backend: FakeBackend) -> None:
    keys = ring(requests_per_minute=1)
    ledger = CountedLedger(keys.limited)
    async with client_of(make_app(backend, keys, ledger)) as client:
        for _ in range(3):
            answer = await ask(client, BOB)
            assert answer.status_code == 200
            assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
        assert (await client.get("/v1/models", headers=bearer(ALICE))).status_code == 200
        assert (await ask(client, "wrong")).status_code == 401
    assert ledger.num_asked == 0


async def test_a_body_that_is_refused_counts_as_a_request(backend: FakeBackend) -> None:
    keys = ring(requests_per_minute=1)
    async with client_of(make_app(backend, keys, KeyLedger(keys.limited, HandClock()))) as client:
        broken = await client.post(CHAT, content=b"{", headers={**JSON, **bearer(ALICE)})
        assert broken.status_code == 400
        assert broken.headers["x-ratelimit-remaining-requests"] == "0"
        assert (await ask(client)).status_code == 429


async def test_without_the_ledger_only_limited_keys_are_refused(
    backend: FakeBackend, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(make_app(backend, ring(requests_per_minute=9), DeadLedger())) as client:
        refused = await ask(client)
        assert (await ask(client, BOB)).status_code == 200
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "rate_limits_unavailable"
    assert refused.headers["retry-after"] == "1"
    assert "key ledger" in caplog.text


async def test_a_silent_ledger_times_out(backend: FakeBackend) -> None:
    class SilentLedger(DeadLedger):
        async def admit(self, name: str, ticket: str) -> Verdict:
            await asyncio.Event().wait()
            raise AssertionError

    app = make_app(backend, ring(requests_per_minute=9), SilentLedger())
    (rates,) = (m for m in app.user_middleware if cast("object", m.cls) is RateLimitMiddleware)
    rates.kwargs["timeout_s"] = 0
    async with client_of(app) as client:
        assert (await ask(client)).status_code == 503


@for_each((0, "0ms"), (0.02, "20ms"), (1, "1s"), (1.25, "1.25s"), (59.9999, "1m0s"), (360, "6m0s"))
def test_durations_are_written_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text
    assert re.fullmatch(r"(\d+m)?[\d.]+s|\d+ms", text)


async def test_tokens_of_classified_texts_are_charged_too(backend: FakeBackend) -> None:
    keys = ring(tokens_per_minute=100)
    ledger = CountedLedger(keys.limited)
    async with client_of(make_app(backend, keys, ledger, classifier=FakeClassifier())) as client:
        for path in ("/v1/classify", "/classify"):
            body = {"input": ["one two", "three"]}
            answer = await client.post(path, json=body, headers=bearer(ALICE))
            assert answer.status_code == 200
    assert ledger.settled == [4 + 3, 4 + 3]
