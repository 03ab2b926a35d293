import asyncio
import threading
import time
from collections.abc import Mapping, Sequence

import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from deployments.contract.errors import GenerationFailedError
from deployments.contract.output import TextDelta
from deployments.contract.telemetry.metric_store import Snapshot
from deployments.contract.telemetry.metric_table import GENERATOR, POOLER
from serve_app.api.server import metrics
from serve_app.api.server.metrics import exposition
from serve_app.config import AppConfig, Scope
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing
from serve_app.metrics import ALL, INGRESS, IngressMetrics
from tests.serve_app.apps import ALICE, BOB, Client, bearer, client_of, key, question
from tests.serve_app.fakes import HELLO, FakeBackend, Step

CHAT = "/v1/chat/completions"


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return what Prometheus reads: the value of each series."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def delivered(text: str, **labels: str) -> float:
    """Return the delivered tokens with these labels."""
    return sum(
        value
        for (name, theirs), value in samples(text).items()
        if name == "raystream_delivered_tokens_total" and labels.items() <= theirs
    )


def app_of(
    config: AppConfig, host: str | None, keys: KeyRing | None = None, steps: Sequence[Step] = HELLO
) -> FastAPI:
    metrics = IngressMetrics(["m"], "Ingress", "replica-1")
    models = {"m": FakeBackend(steps)}
    return build_app(AppParts(config, models, keys=keys, host=host, metrics=metrics))


@pytest.mark.parametrize("streams", [False, True])
async def test_delivered_tokens_are_those_that_the_client_reads(
    config: AppConfig, streams: bool
) -> None:
    async with client_of(app_of(config, "127.0.0.1")) as client:
        for _ in range(2):
            await client.ask(CHAT, question(stream=streams))
        text = (await client.get("/metrics")).text
    assert delivered(text, model_name="m", deployment="Ingress") == 2 * 5
    prompts = [value for (name, _), value in samples(text).items() if "prompt_tokens" in name]
    assert prompts == [14]


@pytest.mark.parametrize(("streams", "num_read"), [(False, 0), (True, 3)])
async def test_of_an_answer_that_fails_only_what_was_sent_is_delivered(
    config: AppConfig, streams: bool, num_read: int
) -> None:
    steps: list[Step] = [[TextDelta((1, 2, 3), "abc")], GenerationFailedError("broken")]
    async with client_of(app_of(config, "127.0.0.1", steps=steps)) as client:
        answer = await client.post(CHAT, json=question(stream=streams))
        assert "generation_failed" in answer.text
        text = (await client.get("/metrics")).text
    assert delivered(text) == num_read


async def test_tokens_are_counted_for_each_key(config: AppConfig) -> None:
    alice = key("alice", ALICE).model_copy(update={"scopes": (Scope.OPERATE,)})
    keys = KeyRing((alice, key("bob", BOB)))
    async with client_of(app_of(config, None, keys)) as client:
        for _ in range(2):
            await client.post(CHAT, json=question(), headers=bearer(BOB))
        await client.post(CHAT, json=question(), headers=bearer(ALICE))
        text = (await client.get("/metrics", headers=bearer(ALICE))).text
    assert (delivered(text, key="bob"), delivered(text, key="alice")) == (10, 5)


async def test_a_scrape_needs_a_key_with_the_scope(config: AppConfig) -> None:
    scraper = key("prometheus", ALICE).model_copy(update={"scopes": (Scope.OPERATE,)})
    keys = KeyRing((scraper, key("bob", BOB)))
    async with client_of(app_of(config, None, keys)) as client:
        assert (await client.get("/metrics")).status_code == 401
        assert (await client.get("/metrics", headers=bearer(BOB))).status_code == 403
        answer = await client.get("/metrics", headers=bearer(ALICE))
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("0.0.0.0", 403)])
async def test_without_keys_only_this_machine_may_scrape(
    config: AppConfig, host: str, status: int
) -> None:
    async with client_of(app_of(config, host)) as client:
        assert (await client.get("/metrics")).status_code == status


def snapshot(replica: str, **numbers: float) -> Snapshot:
    return Snapshot("m", replica, 0.0, {name: ((("m",), (n,)),) for name, n in numbers.items()})


def test_each_process_has_a_series_of_its_own_under_vllm_s_name() -> None:
    text = exposition(
        [snapshot("a", vllm_num_requests_running=2), snapshot("b", vllm_num_requests_running=3)]
    ).decode()
    assert text.splitlines() == [
        "# HELP vllm:num_requests_running Sequences, or texts' requests, that run.",
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{deployment="m",model_name="m",replica="a"} 2.0',
        'vllm:num_requests_running{deployment="m",model_name="m",replica="b"} 3.0',
    ]


def test_a_histogram_is_one_to_prometheus() -> None:
    numbers = (*range(len(ALL["raystream_batch_sequences"].buckets) + 1), 42.0)
    snapshot = Snapshot("m", "a", 0.0, {"raystream_batch_sequences": ((("m",), numbers),)})
    (family,) = text_string_to_metric_families(exposition([snapshot]).decode())
    assert family.type == "histogram"
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in family.samples
        if sample.labels.get("le") in (None, "1.0", "+Inf")
    }
    assert found == {
        ("raystream_batch_sequences_bucket", "1.0"): 0,
        ("raystream_batch_sequences_bucket", "+Inf"): 9,
        ("raystream_batch_sequences_count", None): 9,
        ("raystream_batch_sequences_sum", None): 42,
    }


def test_a_replica_of_another_version_is_shown_as_far_as_it_is_known() -> None:
    other = Snapshot(
        "m",
        "a",
        0.0,
        {
            "vllm_num_requests_running": ((("m",), (1.0,)),),
            "raystream_batch_sequences": ((("m",), (1.0, 2.0, 3.0)),),
            "raystream_unheard_of_total": ((("m",), (1.0,)),),
        },
    )
    assert len(samples(exposition([other]).decode())) == 1


def test_the_same_values_give_the_same_text_in_any_order() -> None:
    forth, back = Snapshot("m", "a", 0.0, two_series()), Snapshot("m", "a", 9.0, two_series(-1))
    assert exposition([forth]) == exposition([back])


def two_series(
    step: int = 1,
) -> Mapping[str, tuple[tuple[tuple[str, ...], tuple[float, ...]], ...]]:
    series = ((("m", "alice"), (1.0,)), (("m", "bob"), (2.0,)))
    return {"raystream_delivered_tokens_total": series[::step]}


@pytest.mark.parametrize("number", [0.0, 3.0, 1e21, 0.001])
def test_numbers_and_labels_are_read_as_they_were(number: float) -> None:
    found = samples(exposition([snapshot('a\n"\\', vllm_num_requests_running=number)]).decode())
    assert list(found.values()) == [number]
    assert ("replica", 'a\n"\\') in next(iter(found))[1]


async def test_the_text_is_rendered_once_for_the_same_values(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with client_of(app_of(config, "127.0.0.1")) as client:
        first = (await client.get("/metrics")).content
        monkeypatch.setattr(metrics, "exposition", None)
        assert (await client.get("/metrics")).content == first


async def test_the_text_is_rendered_once_for_scrapers_that_come_together(
    config: AppConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def slow(snapshots: Sequence[Snapshot]) -> bytes:
        threads.append(threading.current_thread().name)
        time.sleep(0.1)
        return exposition(snapshots)

    monkeypatch.setattr(metrics, "exposition", slow)
    async with client_of(app_of(config, "127.0.0.1")) as client:
        answers = await asyncio.gather(*(client.get("/metrics") for _ in range(3)))
    assert threads == ["metrics_0"]
    assert len({answer.content for answer in answers}) == 1


async def test_the_route_is_documented(client: Client) -> None:
    operation = (await client.get("/openapi.json")).json()["paths"]["/metrics"]["get"]
    assert set(operation["responses"]) == {"200", "default"}


def test_all_metrics_are_known_by_name() -> None:
    assert len(ALL) == len({*GENERATOR, *POOLER, *INGRESS})
