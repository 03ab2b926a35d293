import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
from ray import serve

from deployments.contract.errors import RaystreamError
from deployments.contract.pooling import Pooled, PoolingInput, PoolingRequest, TextPair
from deployments.pooler_replica import MAX_BRIEF_CHARACTERS, MAX_BRIEF_TEXTS, is_brief
from deployments.pooling.text_encoder import EncodedTexts
from deployments.text_pooler import TextPooler
from tests.deployments.tiny_folder import spec
from tests.pooling.tiny_folder import save_classifier

DEADLINE_S = 20
LONG = "x" * (MAX_BRIEF_CHARACTERS + 1)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ((LONG[1:],), True),
        ((LONG,), False),
        ((LONG[2:], "x"), True),
        ((LONG[1:], "x"), False),
        ((TextPair(LONG[2:], "x"),), True),
        ((TextPair(LONG[1:], "x"),), False),
        (((1,) * MAX_BRIEF_CHARACTERS,), True),
        (("",) * MAX_BRIEF_TEXTS, True),
        (("",) * (MAX_BRIEF_TEXTS + 1), False),
    ],
)
def test_few_characters_in_few_texts_are_brief(
    texts: tuple[PoolingInput, ...], expected: bool
) -> None:
    assert is_brief(PoolingRequest("r", texts)) is expected


class Replica(TextPooler):
    """Gathers in a queue of its own, since a class's stays with one event loop."""

    @serve.batch
    async def _encode(self, requests: list[PoolingRequest]) -> list[EncodedTexts | RaystreamError]:
        """Encode requests that arrived together, as every replica does."""
        return await self._encode_on_thread(requests)


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextPooler]:
    folder = save_classifier(tmp_path_factory.mktemp("roberta"))
    made = Replica(spec(folder))
    yield made
    made.__del__()


class Tokenizer:
    """Notes on which thread each text of a replica is tokenized, and may hold that thread back."""

    def __init__(self, replica: TextPooler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.begun, self.may_go_on = threading.Event(), threading.Event()
        self._encode = replica._encoder.encode
        monkeypatch.setattr(replica._encoder, "encode", self._noting)

    def _noting(self, requests: Sequence[PoolingRequest]) -> list[EncodedTexts | RaystreamError]:
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.may_go_on.wait(DEADLINE_S)
        self.threads += [threading.current_thread().name for _ in requests]
        return self._encode(requests)


@pytest.fixture
def tokenizer(replica: TextPooler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tokenizer]:
    held = Tokenizer(replica, monkeypatch)
    yield held
    held.may_go_on.set()


def ask(replica: TextPooler, text: str) -> "asyncio.Future[object]":
    return asyncio.ensure_future(replica.pool(PoolingRequest("r", (text,), truncate=True)))


async def test_a_short_text_is_tokenized_on_the_event_loop_and_a_long_one_on_a_thread(
    replica: TextPooler, tokenizer: Tokenizer
) -> None:
    tokenizer.may_go_on.set()
    for text in ("short", LONG, "short"):
        assert isinstance(await ask(replica, text), Pooled)
    loop = threading.current_thread().name
    assert tokenizer.threads == [loop, "encode_0", loop]


async def test_a_short_text_waits_for_the_thread_while_that_is_in_the_tokenizer(
    replica: TextPooler, tokenizer: Tokenizer
) -> None:
    long = ask(replica, LONG)
    assert await asyncio.to_thread(tokenizer.begun.wait, DEADLINE_S)
    short = ask(replica, "short")
    async with asyncio.timeout(DEADLINE_S):
        while replica._queue.num_waiting < 2:  # noqa: ASYNC110 - the queue does not announce changes
            await asyncio.sleep(0)
    assert tokenizer.threads == []
    tokenizer.may_go_on.set()
    assert all(isinstance(each, Pooled) for each in await asyncio.gather(long, short))
    assert tokenizer.threads == ["encode_0", "encode_0"]
