import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification

from deployments.channel import go_ahead
from deployments.contract.descriptions import PoolerDescription
from deployments.contract.errors import (
    ContextLengthExceededError,
    InvalidRequestError,
    PoolingFailedError,
    ReplicaUnavailableError,
)
from deployments.contract.gen_ai_spans import ModelSpans
from deployments.contract.generation import Refused, Started
from deployments.contract.pooling import CallAddress, Pooled, PoolingEvent, PoolingRequest
from deployments.contract.telemetry.metric_table import E2E
from deployments.contract.telemetry.tracing import (
    SpanKind,
    TraceContext,
    TracingSettings,
    open_tracer,
)
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.plan.memory_budget import DeviceMemoryError
from deployments.plan.replica_plan import ReplicaPlan
from deployments.pooler_replica import MAX_BATCH_SIZE
from deployments.replica.device_share import plan_share
from deployments.text_pooler import TextPooler
from serve_app.backends.replicas.token_channels import Channel, TokenChannels
from tests.deployments.tiny_folder import spec
from tests.failing import failing
from tests.otlp_receiver import receiving
from tests.pooling.test_cross_encoder import cross_distilbert, save
from tests.pooling.tiny_classifiers import LABELS, MODELS
from tests.pooling.tiny_embedders import save_embedder
from tests.pooling.tiny_folder import framing_tokenizer, save_classifier

DEADLINE_S = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("roberta"))


@pytest.fixture(scope="module")
def classifier(folder: Path) -> Iterator[TextPooler]:
    made = TextPooler(spec(folder, max_model_len=4096))
    yield made
    made.__del__()


@pytest.fixture(autouse=True)
def default_settings(classifier: TextPooler) -> Iterator[None]:
    yield
    classifier.reconfigure({})


class Gate:
    """Holds back the batches of a replica's model until it is opened."""

    def __init__(self, classifier: TextPooler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.classifier = classifier
        self._model = classifier._placed.pooler.model
        self._stock = self._model.forward
        self._may_go_on = threading.Event()
        self._begun = threading.Event()
        self.batch_sizes: list[int] = []
        monkeypatch.setattr(self._model, "forward", self._forward)

    def _forward(self, **inputs: Any) -> Any:
        self.batch_sizes.append(len(inputs["input_ids"]))
        self._begun.set()
        assert self._may_go_on.wait(DEADLINE_S)
        return self._stock(**inputs)

    async def wait_for_batch(self) -> None:
        assert await asyncio.to_thread(self._begun.wait, DEADLINE_S)

    def open(self) -> None:
        self._may_go_on.set()

    @asynccontextmanager
    async def is_busy(self) -> AsyncIterator[None]:
        """Let the model compute a text until the block ends; what is asked in it waits."""
        running = asyncio.ensure_future(classified(self.classifier, "running"))
        await self.wait_for_batch()
        yield
        self.open()
        await running

    async def queue(self, number: int, *texts: str) -> asyncio.Future[Pooled]:
        """Ask for texts, and wait until so many requests wait to be computed."""
        asked = asyncio.ensure_future(classified(self.classifier, *texts))
        await until(lambda: num_ready(self.classifier) == number)
        return asked


@pytest.fixture
def gate(classifier: TextPooler, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(classifier, monkeypatch)
    yield gate
    gate.open()
    classifier._worker.ping().result(DEADLINE_S)  # no batch is in the gate any more


def ask(*texts: str, truncate: bool = False) -> PoolingRequest:
    return PoolingRequest("r", texts, truncate)


def num_ready(classifier: TextPooler) -> int:
    """Return how many requests wait that are encoded."""
    return sum(map(len, classifier._queue._ready.values()))


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - the queue does not announce changes
            await asyncio.sleep(0)


async def classified(classifier: TextPooler, *texts: str) -> Pooled:
    found = await classifier.pool(ask(*texts))
    assert isinstance(found, Pooled)
    return found


async def test_answers_are_the_stock_model_s_in_the_order_of_the_texts(
    classifier: TextPooler, folder: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = framing_tokenizer()
    texts = ("short", "much longer than the others " * 3, "", "short")
    found = await classified(classifier, *texts)
    assert found.replica_id == classifier._replica_id
    for text, each in zip(texts, found.texts, strict=True):
        inputs = torch.tensor([tokenizer(text)["input_ids"]])
        expected = model(input_ids=inputs).logits.softmax(-1)[0]
        torch.testing.assert_close(torch.tensor(each.scores), expected)
        assert (each.num_tokens, each.is_truncated) == (inputs.shape[1], False)


async def test_an_embedding_model_s_vectors_come_as_bytes(tmp_path: Path) -> None:
    folder = save_embedder(tmp_path)
    texts = ("short", "much longer than the others " * 3, "short")
    expected = SentenceTransformer(str(folder), device="cpu").encode(list(texts))
    embedder = TextPooler(spec(folder, max_model_len=4096, task="embed"))
    try:
        told = await embedder.describe()
        found = await embedder.pool(replace(ask(*texts), operation="embeddings"))
    finally:
        embedder.__del__()
    assert told.embedding is not None
    assert (told.embedding.width, told.labels) == (32, ())
    assert isinstance(found, Pooled)
    vectors = torch.tensor([each.vector.tolist() for each in found.texts])
    torch.testing.assert_close(vectors, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert [len(each.row) for each in found.texts] == [4 * 32] * 3


async def test_a_replica_describes_its_model(classifier: TextPooler) -> None:
    told = await classifier.describe()
    labels = tuple(LABELS.values())
    assert told == PoolerDescription(
        "tiny", told.created, 128, labels, False, root="tiny", footprint=told.footprint
    )
    assert told.footprint is not None
    assert told.footprint.dtype == "float32"
    assert told.footprint.weight_bytes >= 4 * told.footprint.num_parameters > 0


async def test_a_text_that_is_too_long_is_refused_or_truncated(classifier: TextPooler) -> None:
    refused = await classifier.pool(ask("x" * 1000))
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, ContextLengthExceededError)
    assert "1002 tokens" in str(refused.error)
    assert (refused.error.param, refused.replica_id) == ("input[0]", classifier._replica_id)
    found = await classifier.pool(ask("x" * 1000, "y", truncate=True))
    assert isinstance(found, Pooled)
    assert [(c.num_tokens, c.is_truncated) for c in found.texts] == [(128, True), (3, False)]


async def test_a_request_that_cannot_run_is_refused_by_itself(classifier: TextPooler) -> None:
    bad, good = await asyncio.gather(classifier.pool(ask("\ud800")), classifier.pool(ask("ok")))
    assert isinstance(bad, Refused)
    assert isinstance(bad.error, InvalidRequestError)
    assert isinstance(good, Pooled)


async def test_a_fault_of_ours_is_raised(
    classifier: TextPooler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier._encoder, "_tokenize", failing(KeyError("a bug")))
    with pytest.raises(PoolingFailedError):
        await classifier.pool(ask("one"))


async def test_requests_that_wait_while_the_device_is_busy_run_together(gate: Gate) -> None:
    first = asyncio.ensure_future(classified(gate.classifier, "first"))
    await gate.wait_for_batch()
    others = [asyncio.ensure_future(classified(gate.classifier, f"{i}", "x")) for i in range(5)]
    await until(lambda: num_ready(gate.classifier) == 5)
    gate.open()
    await asyncio.gather(first, *others)
    assert gate.batch_sizes == [1, 10]


async def test_a_full_replica_refuses_and_says_when_to_retry(gate: Gate) -> None:
    gate.classifier.reconfigure({"max_queued_requests": 1})
    async with gate.is_busy():
        waiting = await gate.queue(1, "waiting")
        refused = await gate.classifier.pool(ask("one", "too", "many"))
        assert isinstance(refused, Refused)
        assert "max_queued_requests is 1" in str(refused.error)
        assert (refused.error.retry_after_s or 0) >= 1
        assert refused.replica_id == gate.classifier._replica_id
        gate.classifier.reconfigure({"max_queued_requests": 2})
        late = await gate.queue(2, "late")
    await asyncio.gather(waiting, late)


async def test_waiting_tokens_are_bounded_too(gate: Gate) -> None:
    gate.classifier.reconfigure({"max_queued_tokens": 10})
    async with gate.is_busy():
        waiting = await gate.queue(1, "x" * 4)
        refused = await gate.classifier.pool(ask("x" * 3))
        assert isinstance(refused, Refused)
        assert "6 tokens wait (max_queued_tokens is 10)" in str(refused.error)
        refused = await gate.classifier.pool(ask("x" * 9))
        assert isinstance(refused, Refused)
        assert isinstance(refused.error, InvalidRequestError)
        assert "11 tokens" in str(refused.error)
    await waiting


async def test_a_cancelled_request_leaves_the_queue(gate: Gate) -> None:
    async with gate.is_busy():
        gone = await gate.queue(1, "gone", "as well")
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert gate.classifier._queue.num_waiting == 0
        stays = await gate.queue(1, "stays")
    await stays
    assert gate.batch_sizes == [1, 1]


async def test_user_config_changes_how_requests_are_batched(
    classifier: TextPooler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    encode = classifier._encoder.encode

    def counting(requests: Any) -> Any:
        sizes.append(len(requests))
        return encode(requests)

    monkeypatch.setattr(classifier._encoder, "encode", counting)
    for max_batch_size, expected in ((4, [4, 4]), (2, [2, 2, 2, 2])):
        sizes.clear()
        classifier.reconfigure({"max_batch_size": max_batch_size, "batch_wait_timeout_s": 5})
        await asyncio.gather(*(classified(classifier, "x") for _ in range(8)))
        assert sizes == expected
    classifier.reconfigure({})
    batching: Any = classifier._encode
    assert batching._get_max_batch_size() == MAX_BATCH_SIZE
    assert batching._get_batch_wait_timeout_s() == 0


async def test_a_replica_that_has_answered_everything_reports_that_it_is_idle(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []

    def observe_queue(*, num_running: int, num_waiting: int) -> None:
        seen.append((num_running, num_waiting))

    monkeypatch.setattr(gate.classifier._metrics, "observe_queue", observe_queue)
    async with gate.is_busy():
        waiting = await gate.queue(1, "waiting")
    await waiting
    # The first may be of an earlier test's batch, which is recorded after it is answered.
    await until(lambda: seen[-1:] == [(0, 0)])


@pytest.mark.parametrize("name", ["bart", "t5", "xlnet", "fnet"])
async def test_a_model_that_needs_special_tokens_or_takes_no_padding_is_served(
    name: str, tmp_path: Path
) -> None:
    save_classifier(tmp_path, MODELS[name]())
    made = TextPooler(spec(tmp_path, max_model_len=100))
    try:
        texts = ("a", "some words", "as many words again, and more")
        together = await classified(made, *texts)
        await made.ping()
        alone = [(await classified(made, text)).texts[0] for text in texts]
        for one, other in zip(together.texts, alone, strict=True):
            assert one.scores == pytest.approx(other.scores, abs=1e-5)
    finally:
        made.__del__()


async def test_a_healthy_replica_passes_its_check_idle_or_busy(gate: Gate) -> None:
    async with gate.is_busy():
        ping = asyncio.ensure_future(gate.classifier.ping())
    await ping
    for _ in range(2):
        await gate.classifier.check_health()


async def test_a_micro_batch_that_hangs_ends_the_requests_and_the_health(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.compute.work_watch.ANSWER_S", 0.1)
    ends: list[str] = []
    classifier = TextPooler(spec(folder), end_process=lambda: ends.append("ended"))
    gate = Gate(classifier, monkeypatch)
    running = asyncio.ensure_future(classified(classifier, "running"))
    await gate.wait_for_batch()
    await classifier.check_health()  # a long micro-batch is no reason
    classifier._placed.pooler.max_batch_s = 0.0
    with pytest.raises(ReplicaUnavailableError, match="hangs"):
        await classifier.check_health()
    with pytest.raises(ReplicaUnavailableError):
        await running
    assert ends == ["ended"]
    gate.open()
    classifier.__del__()


@pytest.mark.slow
async def test_a_replica_whose_worker_has_ended_is_unhealthy(folder: Path) -> None:
    classifier = TextPooler(spec(folder))
    classifier._worker.stop()
    for broken in (classifier.check_health(), classifier.ping(), classifier.pool(ask("x"))):
        with pytest.raises(ReplicaUnavailableError):
            await broken
    classifier.__del__()


def test_a_deleted_replica_leaves_no_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    classifier = TextPooler(spec(folder))
    classifier.__del__()
    assert {t.name for t in set(threading.enumerate()) - before} & {"pooler", "encode"} == set()


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="can't load") as caught:
        TextPooler(spec(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_micro_batch_that_does_not_fit_fails_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "deployments.text_pooler.PoolingModel.__call__",
        failing(torch.OutOfMemoryError("out of memory")),
    )
    with pytest.raises(DeviceMemoryError, match="lower max_batched_tokens or max_model_len"):
        TextPooler(spec(folder))


@pytest.mark.parametrize(
    ("family", "given", "expected"),
    [("roberta", "auto", 16_384), ("mpnet", "auto", 2048), ("mpnet", 16_384, 16_384)],
)
def test_auto_batches_are_large_only_if_the_model_packs_its_texts(
    family: str, given: int | str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planned_as_on_a_gpu(*args: Any, **options: Any) -> ReplicaPlan:
        plan = plan_share(*args, **options)
        return replace(plan, sizes=replace(plan.sizes, max_batched_tokens=16_384))

    monkeypatch.setattr("deployments.text_pooler.plan_share", planned_as_on_a_gpu)
    save_classifier(tmp_path, MODELS[family]())
    made = TextPooler(spec(tmp_path, max_batched_tokens=given))
    try:
        assert made._device_worker._budget.max_tokens == expected
        assert made._facts.memory.max_batched_tokens == expected
        in_step = made._placed.plan.demand.activation_bytes
        assert in_step == made._placed.plan.with_weights(1, 0).demand.activation_bytes
    finally:
        made.__del__()


def test_a_model_with_one_label_that_fails_on_pairs_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.pooling.model_loader.reads_types", lambda model: True)
    with pytest.raises(UnsupportedModelError, match="fails on a pair of texts"):
        TextPooler(spec(save(tmp_path, cross_distilbert())))


@asynccontextmanager
async def channel_to(classifier: TextPooler) -> AsyncIterator[Channel]:
    """Connect to a replica as an ingress does."""
    told = await classifier.call_address()
    assert told.replica_id == classifier._replica_id
    assert told.channel is not None
    channels = TokenChannels({})
    async with aclosing(channels):
        yield await channels.reach(told.channel)


async def test_a_request_that_comes_through_the_channel_is_answered_as_serve_s_call_is(
    classifier: TextPooler,
) -> None:
    classifier.reconfigure({"max_queued_requests": 0})
    async with channel_to(classifier) as channel:
        for request in (ask("one", "two"), ask("\ud800"), ask("x" * 1000), ask("y" * 99)):
            called, sent = await classifier.pool(request), await channel.call(request)
            assert sent is not None
            assert type(sent.outcome) is type(called)
            if isinstance(called, Refused):
                assert isinstance(sent.outcome, Refused)
                assert sent.outcome.error.args == called.error.args
            else:
                assert sent.outcome == called
        with classifier._queue.entered():
            full = await channel.call(ask("one"))
        assert full is not None
        assert isinstance(full.outcome, Refused)
        assert "max_queued_requests is 0" in str(full.outcome.error)
        assert (full.outcome.error.retry_after_s or 0) >= 1


async def test_a_request_through_the_channel_whose_client_leaves_leaves_the_queue(
    gate: Gate,
) -> None:
    async with channel_to(gate.classifier) as channel, gate.is_busy():
        gone = asyncio.ensure_future(channel.call(ask("gone")))
        await until(lambda: num_ready(gate.classifier) == 1)
        gone.cancel()
        await until(lambda: gate.classifier._queue.num_waiting == 0)
    assert gate.batch_sizes == [1]


async def test_a_replica_that_serve_stops_ends_after_its_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classifier = TextPooler(spec(folder))
    gate = Gate(classifier, monkeypatch)
    async with channel_to(classifier) as channel:
        asked = asyncio.ensure_future(channel.call(ask("running")))
        await gate.wait_for_batch()
        stopping = classifier.__del__()
        assert stopping is not None
        stopped = asyncio.ensure_future(stopping)
        gate.open()
        answer = await asked
        await stopped
        assert answer is not None
        assert isinstance(answer.outcome, Pooled)
        await channel.closed
        assert channel.is_stopping


async def test_a_replica_that_serve_scales_by_its_calls_takes_only_those(
    classifier: TextPooler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.pooler_replica.is_scaled_by_calls", lambda: True)
    assert await classifier.call_address() == CallAddress(classifier._replica_id, None)


def let_begin(classifier: TextPooler, told: list[PoolingEvent]) -> None:
    """Give a suspect its go-ahead, as the ingress's channel does."""
    (started,) = told
    assert isinstance(started, Started)
    classifier._channels.go_aheads.give(started.number)


async def test_suspects_are_classified_one_at_a_time_beside_other_texts(gate: Gate) -> None:
    suspect = PoolingRequest("s", ("bad",), num_deaths=1)
    first, second = (aiter(gate.classifier.pool_in_turn(suspect)) for _ in range(2))
    let_begin(gate.classifier, await anext(first))
    answer = asyncio.ensure_future(anext(first))
    await gate.wait_for_batch()
    waiting = asyncio.ensure_future(anext(second))
    other = asyncio.ensure_future(classified(gate.classifier, "good"))
    await until(lambda: num_ready(gate.classifier) == 1)
    assert gate.classifier._queue.num_waiting == 1, "a suspect that waits takes no room from others"
    assert not waiting.done()
    gate.open()
    assert await answer == [await classified(gate.classifier, "bad")]
    assert len((await other).texts) == 1
    async with asyncio.timeout(DEADLINE_S):
        assert isinstance((await waiting)[0], Started)
    await second.aclose()  # type: ignore[attr-defined] # a generator


async def test_a_suspect_that_is_refused_is_told_so(classifier: TextPooler) -> None:
    for text in ("\ud800", "x" * 1000):
        events = aiter(classifier.pool_in_turn(PoolingRequest("s", (text,), num_deaths=1)))
        let_begin(classifier, await anext(events))
        (answer,) = [event async for (event,) in events]
        assert isinstance(answer, Refused)
        assert isinstance(answer.error, InvalidRequestError)


async def test_a_suspect_without_its_go_ahead_is_not_classified(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(go_ahead, "TICK_S", 0.0)
    suspect = PoolingRequest("s", ("bad",), num_deaths=1)
    for _ in range(2):
        found = [event async for (event,) in gate.classifier.pool_in_turn(suspect)]
        assert [type(event) for event in found] == [Started]
    assert gate.classifier._queue.num_waiting == 0


async def test_an_operator_sees_what_a_classifier_has(gate: Gate) -> None:
    asking = asyncio.ensure_future(gate.classifier.pool(ask("a text")))
    await gate.wait_for_batch()
    report = await gate.classifier.inspect()
    gate.open()
    await asking
    assert (report.work.num_running, report.work.num_waiting) == (1, 0)
    assert report.work.kv_usage is report.work.num_preempted is None
    assert report.plan.kv_bytes == 0 < report.plan.weight_bytes


async def test_a_request_s_time_begins_where_it_arrived(classifier: TextPooler) -> None:
    ((_, before),) = classifier._store.snapshot().series[E2E.name]
    await classifier.pool(replace(ask("one"), elapsed_s=1000.0))
    ((_, after),) = classifier._store.snapshot().series[E2E.name]
    assert 1000 <= after[-1] - before[-1] < 1000 + DEADLINE_S


async def test_a_traced_request_s_span_tells_its_tokens_and_its_wait(
    classifier: TextPooler, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = TraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    with receiving() as receiver:
        tracer = open_tracer(TracingSettings(receiver.url), "raystream-replica", "r")
        assert tracer is not None
        monkeypatch.setattr(classifier, "_spans", ModelSpans(tracer, "c", SpanKind.SERVER))
        found = await classifier.pool(replace(ask("one", "two"), trace=trace))
        classifier.reconfigure({"max_queued_requests": 0})
        with classifier._queue.entered():
            refused = await classifier.pool(replace(ask("one"), trace=trace))
        tracer.close()
    assert isinstance(found, Pooled)
    assert isinstance(refused, Refused)
    answered, turned_away = receiver.spans
    assert 0 <= answered.attributes.pop("gen_ai.latency.time_in_queue") < DEADLINE_S
    assert answered.attributes == {
        "gen_ai.operation.name": "classify",
        "gen_ai.provider.name": "raystream",
        "gen_ai.request.model": "c",
        "gen_ai.usage.input_tokens": sum(each.num_tokens for each in found.texts),
    }
    assert turned_away.events == [("refused", {"error.type": "overloaded"})]
