"""`priority` in a body: bounded by the API key, and part of what the request claims."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from deployments.contract.claims import Claim
from serve_app.config import MAX_PRIORITY, MIN_PRIORITY
from serve_app.keys.api_keys import KeyRing
from tests.offenders import every
from tests.serve_app.apps import ALICE, BOB, bearer, client_of, key, make_app
from tests.serve_app.fake_pooler import FakeClassifier, FakeCrossEncoder, FakeEmbedder
from tests.serve_app.fakes import FakeBackend

if TYPE_CHECKING:
    from deployments.contract.generation import GenerationRequest
    from deployments.contract.pooling import PoolingRequest

MESSAGES: Final = [{"role": "user", "content": "Hello?"}]
BODIES: Final[list[tuple[str, Mapping[str, Any]]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/completions", {"prompt": "a", "n": 2}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/classify", {"input": "a"}),
    ("/classify", {"input": "a"}),
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/v2/rerank", {"query": "a", "documents": ["b"]}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
]
BODIES_WITHOUT: Final[list[tuple[str, Mapping[str, Any]]]] = [
    ("/v1/messages", {"model": "m", "messages": MESSAGES, "max_tokens": 5}),
    ("/text-generation", {"prompt": "a"}),
]


class Served:
    """An application with a model for each route, and the claims that reach the models."""

    def __init__(self, keys: KeyRing | None = None) -> None:
        self._backends = FakeBackend(), FakeClassifier(), FakeEmbedder(), FakeCrossEncoder()
        generator, classifier, embedder, cross_encoder = self._backends
        self._app = make_app(
            generator, keys, classifier=classifier, embedder=embedder, cross_encoder=cross_encoder
        )

    async def claims(self, path: str, body: Mapping[str, Any], secret: str = ALICE) -> list[Claim]:
        """Return what the request for a body claims of its model."""
        async with client_of(self._app) as client:
            answer = await client.post(path, json=dict(body), headers=bearer(secret))
        assert answer.status_code == 200, answer.text
        asked: list[GenerationRequest | PoolingRequest] = []
        for backend in self._backends:
            asked += backend.requests
            backend.requests.clear()
        return [each.claim for each in asked]

    async def refusal(self, path: str, body: Mapping[str, Any], secret: str = ALICE) -> Any:
        """Return the message and the field of a 400."""
        async with client_of(self._app) as client:
            answer = await client.post(path, json=dict(body), headers=bearer(secret))
        assert answer.status_code == 400, answer.text
        assert not any(backend.requests for backend in self._backends)
        return answer.json()


async def test_a_request_claims_its_priority_at_each_route_that_takes_one() -> None:
    served = Served()
    for case in every(BODIES):
        with case as (path, body):
            for priority in (7, -7, MIN_PRIORITY, MAX_PRIORITY):
                claims = await served.claims(path, {**body, "priority": priority})
                assert claims == [Claim(priority)] * body.get("n", 1)
            assert set(await served.claims(path, {**body, "priority": None})) == {Claim()}


async def test_a_request_without_a_priority_claims_that_of_its_key() -> None:
    served = Served(KeyRing((key("alice", ALICE, priority=3, weight=2.5), key("bob", BOB))))
    for case in every([*BODIES, *BODIES_WITHOUT]):
        with case as (path, body):
            assert set(await served.claims(path, body)) == {Claim(3, "alice", 2.5)}
            assert set(await served.claims(path, body, BOB)) == {Claim(0, "bob")}


async def test_a_priority_is_as_good_as_the_key_allows_and_no_better() -> None:
    alice = key("alice", ALICE, priority=3, best_priority=-2)
    served = Served(KeyRing((alice, key("bob", BOB))))
    for case in every(BODIES):
        with case as (path, body):
            best = await served.claims(path, {**body, "priority": -2})
            assert {each.priority for each in best} == {-2}
            worse = await served.claims(path, {**body, "priority": 9}, BOB)
            assert {each.priority for each in worse} == {9}
            told = str(await served.refusal(path, {**body, "priority": -3}))
            assert "The API key 'alice' allows the priority -2 and higher numbers" in told
            told = str(await served.refusal(path, {**body, "priority": -1}, BOB))
            assert "The API key 'bob' allows the priority 0 and higher numbers" in told


async def test_what_is_no_priority_is_refused_by_name() -> None:
    served = Served()
    for case in every(
        [(path, value) for path, _ in BODIES for value in (MAX_PRIORITY + 1, 0.5, "1", True)]
    ):
        with case as (path, value):
            given = {**dict(BODIES)[path], "priority": value}
            assert "priority" in str(await served.refusal(path, given))
    for path, body in BODIES_WITHOUT:
        assert "priority" in str(await served.refusal(path, {**body, "priority": 1}))
