"""`/v1/batches` through the application, which also runs them."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from deployments.contract.errors import (
    GenerationFailedError,
    OverloadedError,
    ReplicaUnavailableError,
)
from serve_app.config import MAX_PRIORITY, JobsConfig
from serve_app.jobs import batch_run
from serve_app.jobs.jobs import Jobs
from serve_app.keys.api_keys import KeyRing
from tests.serve_app.api.files.test_routes import upload
from tests.serve_app.apps import (
    ALICE,
    BOB,
    AppClient,
    access_lines,
    bearer,
    client_of,
    keeping,
    make_app,
    ring,
)
from tests.serve_app.fake_pooler import FakeClassifier, FakeEmbedder
from tests.serve_app.fakes import HELLO, FakeBackend, FakeClock

BATCHES = "/v1/batches"
COMPLETIONS = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
DEADLINE_S = 120
"""For what takes a second on an idle machine."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@asynccontextmanager
async def running(app: FastAPI, key: str | None = None) -> AsyncIterator[AppClient]:
    """Run the application with its batches."""
    async with app.router.lifespan_context(app), client_of(app) as client:
        if key is not None:
            client.headers = httpx.Headers(bearer(key))
        yield client


def app_of(
    backend: FakeBackend, folder: Path, clock: FakeClock | None = None, **jobs: object
) -> FastAPI:
    return make_app(
        backend,
        classifier=FakeClassifier(),
        embedder=FakeEmbedder(),
        jobs={"folder": str(folder), **jobs},
        clock=clock,
    )


def line(custom_id: str, body: object = None, url: str = COMPLETIONS, **other: object) -> str:
    asked = {"prompt": custom_id} if body is None else body
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": url, "body": asked, **other}
    )


async def create(
    client: AppClient, lines: Sequence[str], endpoint: str = COMPLETIONS, **fields: object
) -> dict[str, Any]:
    file = await upload(client, "\n".join(lines).encode())
    body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch: dict[str, Any] = (await client.ask(BATCHES, {**body, **fields})).json()
    assert batch["status"] == "validating"
    return batch


async def eventually(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not is_true():  # noqa: ASYNC110 - a fake counts its requests
            await asyncio.sleep(0.01)


async def until(client: AppClient, id_: str, *statuses: str) -> dict[str, Any]:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            batch: dict[str, Any] = (await client.get(f"{BATCHES}/{id_}")).json()
            if batch["status"] in statuses:
                return batch
            await asyncio.sleep(0.01)


async def run(client: AppClient, *lines: str, endpoint: str = COMPLETIONS) -> dict[str, Any]:
    created = await create(client, lines, endpoint)
    return await until(client, created["id"], *ENDED)


async def results(client: AppClient, id_: str | None) -> dict[str, dict[str, Any]]:
    if id_ is None:
        return {}
    text = (await client.get(f"/v1/files/{id_}/content")).text
    found = [json.loads(each) for each in text.splitlines()]
    by_id = {str(each["custom_id"]): each for each in found}
    assert len(by_id) == len(found)
    return by_id


async def test_each_line_gets_its_answer(backend: FakeBackend, folder: Path) -> None:
    async with running(app_of(backend, folder)) as client:
        batch = await run(client, *(line(f"r{at}") for at in range(100)))
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 100, "completed": 100, "failed": 0}
        assert batch["error_file_id"] is None
        found = await results(client, batch["output_file_id"])
        assert set(found) == {f"r{at}" for at in range(100)}
        direct = (await client.ask(COMPLETIONS, {"prompt": "r7"})).json()
        answer = found["r7"]["response"]
        assert (answer["status_code"], found["r7"]["error"]) == (200, None)
        assert answer["body"]["id"] == f"cmpl-{answer['request_id']}"
        assert answer["body"]["choices"] == direct["choices"]
        assert answer["body"]["usage"] == direct["usage"]
    assert {request.claim.priority for request in backend.requests[:100]} == {MAX_PRIORITY}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/embeddings", {"model": "e", "input": "a"}),
        ("/v1/classify", {"model": "c", "input": "a"}),
        ("/v1/rerank", {"model": "e", "query": "a", "documents": ["b"]}),
        ("/v2/rerank", {"model": "e", "query": "a", "documents": ["b"]}),
    ],
)
async def test_every_endpoint_answers_lines_as_it_answers_requests(
    backend: FakeBackend, folder: Path, endpoint: str, body: dict[str, Any]
) -> None:
    async with running(app_of(backend, folder)) as client:
        batch = await run(client, line("a", body, endpoint), endpoint=endpoint)
        assert batch["request_counts"]["completed"] == 1, await results(
            client, batch["error_file_id"]
        )
        found = (await results(client, batch["output_file_id"]))["a"]["response"]["body"]
        direct = (await client.ask(endpoint, body)).json()
        assert found.keys() == direct.keys()


async def test_a_bad_line_is_an_error_of_that_line(backend: FakeBackend, folder: Path) -> None:
    bad = {
        "unknown": line("unknown", {"prompt": "a", "promt": "b"}),
        "model": line("model", {"prompt": "a", "model": "nobody"}),
        "better": line("better", {"prompt": "a", "priority": 0}),
        "stream": line("stream", {"prompt": "a", "stream": True}),
        "elsewhere": line("elsewhere", url="/v1/models"),
        "method": line("method", method="GET"),
        "good": line("good"),  # for the second time
        "extra": line("extra", extra=1),
        "None": "{not JSON",
    }
    async with running(app_of(backend, folder)) as client:
        batch = await run(client, line("good"), "", *bad.values(), "  ")
        assert batch["status"] == "completed"
        assert batch["request_counts"] == {"total": 10, "completed": 1, "failed": 9}
        assert set(await results(client, batch["output_file_id"])) == {"good"}
        errors = await results(client, batch["error_file_id"])
        assert set(errors) == set(bad)
        for name in ("unknown", "model"):
            body = json.loads(bad[name])["body"]
            direct = await client.post(COMPLETIONS, json=body)
            told = errors[name]["response"]
            assert (told["status_code"], told["body"]) == (direct.status_code, direct.json())
        better = errors["better"]["response"]["body"]["error"]
        assert better["param"] == "priority"
        assert better["message"].startswith("A batch allows the priority")
        assert errors["stream"]["error"]["param"] == "body.stream"
        assert errors["good"]["error"]["message"].endswith("is that of an earlier line.")
        assert errors["None"]["error"]["line"] == 11


async def test_a_line_without_room_is_asked_again(backend: FakeBackend, folder: Path) -> None:
    backend.scripts = [OverloadedError("full", None, 0.01), OverloadedError("full", None, 0.01)]
    async with running(app_of(backend, folder)) as client:
        batch = await run(client, line("a"))
    assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
    assert len(backend.requests) == 3


async def test_a_line_that_fails_is_not_asked_again(backend: FakeBackend, folder: Path) -> None:
    backend.scripts = [GenerationFailedError("broken")]
    async with running(app_of(backend, folder)) as client:
        batch = await run(client, line("a"))
        errors = await results(client, batch["error_file_id"])
    assert errors["a"]["response"]["body"]["error"]["code"] == "generation_failed"
    assert len(backend.requests) == 1


async def test_a_line_that_loses_replicas_is_given_up(
    backend: FakeBackend, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "MAX_LOSSES", 1)
    backend.refusal = ReplicaUnavailableError("The model's replica is lost.")
    limits, jobs = {"failover_timeout_s": 0.05}, {"folder": str(folder)}
    async with running(make_app(backend, limits=limits, jobs=jobs)) as client:
        batch = await run(client, line("a"))
        errors = await results(client, batch["error_file_id"])
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 1}
    response = errors["a"]["response"]
    assert (response["status_code"], response["body"]["error"]["code"]) == (
        503,
        "replica_unavailable",
    )


async def test_a_batch_without_room_for_results_is_refused(
    backend: FakeBackend, folder: Path
) -> None:
    text = line("a" * 400).encode()
    max_stored_bytes = max(1024, len(text))
    async with running(app_of(backend, folder, max_stored_bytes=max_stored_bytes)) as client:
        file = await upload(client, text + b" " * (max_stored_bytes - len(text)))
        body = {
            "input_file_id": file["id"],
            "endpoint": COMPLETIONS,
            "completion_window": "24h",
        }
        refused = await client.post(BATCHES, json=body)
    assert refused.status_code == 403
    assert "jobs.max_stored_bytes" in refused.json()["error"]["message"]


async def test_a_bounded_number_runs_at_once(backend: FakeBackend, folder: Path) -> None:
    held = asyncio.Event()
    backend.steps = [held, *HELLO]
    async with running(app_of(backend, folder, max_running_lines=3)) as client:
        created = await create(client, [line(f"r{at}") for at in range(10)])
        await eventually(lambda: len(backend.requests) >= 3)
        found = await until(client, created["id"], "in_progress")
        assert found["request_counts"]["total"] == 10
        assert len(backend.requests) == 3
        held.set()
        assert (await until(client, created["id"], *ENDED))["status"] == "completed"


async def test_a_cancelled_batch_keeps_what_it_has(backend: FakeBackend, folder: Path) -> None:
    backend.scripts = [HELLO]
    backend.steps = [asyncio.Event()]
    async with running(app_of(backend, folder, max_running_lines=1)) as client:
        created = await create(client, [line("a"), line("b"), line("c")])
        await eventually(lambda: len(backend.requests) >= 2)
        answer = await client.post(f"{BATCHES}/{created['id']}/cancel")
        assert answer.json()["status"] == "cancelling"
        batch = await until(client, created["id"], *ENDED)
        assert batch["status"] == "cancelled"
        assert set(await results(client, batch["output_file_id"])) == {"a"}
        assert backend.streams[1].closed.is_set()
        again = await client.post(f"{BATCHES}/{created['id']}/cancel")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")


async def test_a_batch_goes_on_where_a_stopped_server_left_it(
    backend: FakeBackend, folder: Path
) -> None:
    backend.scripts = [HELLO, HELLO]
    backend.steps = [asyncio.Event()]
    lines = [line(each) for each in "abcd"]
    async with running(app_of(backend, folder, max_running_lines=1)) as client:
        created = await create(client, lines)
        await eventually(lambda: len(backend.requests) >= 3)
    backend.steps = HELLO
    async with running(app_of(backend, folder)) as client:
        batch = await until(client, created["id"], *ENDED)
        assert set(await results(client, batch["output_file_id"])) == set("abcd")
    prompts = [request.prompt for request in backend.requests]
    assert [prompts.count(each) for each in "abcd"] == [1, 1, 2, 1]


@pytest.mark.parametrize(
    ("lines", "code"), [(["", " "], "empty_file"), ([line("a")] * 4, "too_many_lines")]
)
async def test_a_file_that_can_not_be_run_fails_the_batch(
    backend: FakeBackend, folder: Path, lines: list[str], code: str
) -> None:
    async with running(app_of(backend, folder, max_num_lines=3)) as client:
        batch = await run(client, *lines)
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == code
    assert batch["failed_at"] is not None


async def test_a_batch_that_is_late_gives_its_rest_errors(
    backend: FakeBackend, folder: Path, clock: FakeClock
) -> None:
    backend.scripts = [HELLO]
    backend.steps = [asyncio.Event()]
    app = app_of(backend, folder, clock, max_running_lines=1)
    async with running(app) as client:
        created = await create(client, [line("a"), line("b"), line("c")], completion_window="1m")
        await eventually(lambda: len(backend.requests) >= 2)
        clock.now_s += 61
        batch = await until(client, created["id"], *ENDED)
        assert batch["status"] == "expired"
        assert set(await results(client, batch["output_file_id"])) == {"a"}
        errors = await results(client, batch["error_file_id"])
        assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
        assert set(errors) == {"b", "c"}


async def test_a_key_sees_and_runs_only_its_own(
    backend: FakeBackend, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "ray.serve.raystream.access")
    app = make_app(backend, ring(), jobs={"folder": str(folder)})
    async with running(app, ALICE) as client:
        batch = await run(client, line("a"))
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = await client.request(
                method, f"{BATCHES}/{batch['id']}{path}", headers=bearer(BOB)
            )
            assert answer.status_code == 404
        assert (await client.get(BATCHES, headers=bearer(BOB))).json()["data"] == []
        assert [each["id"] for each in (await client.get(BATCHES)).json()["data"]] == [batch["id"]]
    assert backend.requests[0].claim.tenant == "alice"
    (told,) = [each for each in access_lines(caplog) if each["request_id"].startswith("batch_")]
    assert (told["key"], told["route"], told["status"]) == ("alice", COMPLETIONS, 200)


async def test_a_batch_of_a_key_that_is_gone_fails(backend: FakeBackend, folder: Path) -> None:
    jobs = {"folder": str(folder)}
    app = make_app(backend, ring(), jobs=jobs)
    async with keeping(app) as client:
        client.headers = httpx.Headers(bearer(ALICE))
        created = await create(client, [line("a")])
    only_bob = KeyRing(ring().keys[1:])
    async with running(make_app(backend, only_bob, jobs=jobs), BOB):
        kept = Jobs.of(JobsConfig.model_validate(jobs), FakeClock().unix_s)
        assert kept is not None
        async with asyncio.timeout(DEADLINE_S):
            batch = await kept.batches.find("alice", created["id"])
            while batch.fault is None:
                await asyncio.sleep(0.01)
                batch = await kept.batches.find("alice", created["id"])
        await kept.store.close()
    assert (batch.status, batch.fault.code) == ("failed", "unknown_key")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "24"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"output": 1}, "output"),
    ],
)
async def test_a_wrong_field_is_named(
    backend: FakeBackend, folder: Path, change: dict[str, object], param: str
) -> None:
    async with keeping(app_of(backend, folder)) as client:
        body = {"input_file_id": "x", "endpoint": COMPLETIONS, "completion_window": "24h"}
        assert (await client.refused(BATCHES, {**body, **change}))["param"] == param
        assert (await client.refused(BATCHES, body, 404))["param"] == "input_file_id"


async def test_a_server_without_a_folder_says_what_to_set(client: AppClient) -> None:
    body = {"input_file_id": "x", "endpoint": COMPLETIONS, "completion_window": "24h"}
    assert (await client.refused(BATCHES, body, 403))["code"] == "jobs_disabled"
    for answer in (
        await client.get(BATCHES),
        await client.get(f"{BATCHES}/x"),
        await client.post(f"{BATCHES}/x/cancel"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "jobs_disabled")
