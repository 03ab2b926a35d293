"""Requests that reach a classifier through its channel, on a real Ray: killed and stopped replicas.

This process is the ingress. A replica holds its requests back while the file `hold` is there.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.contract.model_spec import ModelSpec
from deployments.contract.pooling import PooledText, PoolingAnswer, PoolingRequest
from deployments.text_pooler import TextPooler
from serve_app.backends.replicas.handle_backend import HandleBackend
from serve_app.backends.replicas.model_router import PATH as MODEL_ROUTER
from serve_app.backends.replicas.running_replicas import running_replicas_of
from serve_app.backends.streams.failover import Failover
from serve_app.backends.streams.retries import FailoverLimits
from tests.deployments.tiny_folder import spec
from tests.pooling.tiny_folder import save_classifier

MODEL = "held-pooler"
DEADLINE_S = 120
NUM_REQUESTS = 4


class HeldPooler(TextPooler):
    """Counts Serve's calls, and can hold requests back; both in files of the model's folder."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self._folder = Path(spec.source)
        self._channels.take_calls(self._held)

    async def pool(self, request: PoolingRequest) -> PoolingAnswer:
        (self._folder / f"call-{request.request_id}").touch()
        return await super().pool(request)

    async def _held(self, request: PoolingRequest) -> PoolingAnswer:
        (self._folder / f"held-{request.request_id}").write_text(str(os.getpid()))
        while (self._folder / "hold").exists():  # noqa: ASYNC110 - another process removes it
            await asyncio.sleep(0.01)
        return await super().pool(request)

    def __del__(self) -> Coroutine[Any, Any, None] | None:
        if hasattr(self, "_folder"):
            (self._folder / f"stopping-{os.getpid()}").touch()
        return super().__del__()


def files(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern))


async def reached(folder: Path, pattern: str, count: int = 1) -> list[Path]:
    """Wait until so many files are there."""
    while len(found := files(folder, pattern)) < count:  # noqa: ASYNC110 - other processes' files
        await asyncio.sleep(0.01)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("held"))


@pytest.fixture(scope="module")
def handle(base_url: str, folder: Path) -> DeploymentHandle[Any]:
    """Serve one replica, which Serve looks for requests of every 0.2 s once it stops."""
    model = serve.deployment(
        name=MODEL,
        ray_actor_options={"num_cpus": 0.1},
        max_ongoing_requests=512,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=DEADLINE_S,
        request_router_config={"request_router_class": MODEL_ROUTER},
    )(HeldPooler)
    serve.run(model.bind(spec(folder, id=MODEL, task="classify")), name=MODEL, route_prefix=None)
    return serve.get_deployment_handle(MODEL, MODEL)


@pytest.fixture
async def backend(handle: DeploymentHandle[Any], folder: Path) -> AsyncIterator[HandleBackend]:
    """Connect to the replica as an ingress does, by the first request, which is Serve's call."""
    made = HandleBackend(handle, running_replicas_of(MODEL, MODEL))
    await made.send(PoolingRequest("first", ("a",)))
    while made._calls._asking is not None:  # noqa: ASYNC110 - the ingress does not announce it
        await asyncio.sleep(0.01)
    yield made
    await made.aclose()
    (folder / "hold").unlink(missing_ok=True)


async def asked(
    model: HandleBackend | Failover, folder: Path, name: str
) -> tuple["asyncio.Future[list[tuple[PooledText, ...]]]", int]:
    """Ask for some texts and hold them back; return their answers, and the replica's process."""
    (folder / "hold").touch()
    requests = [PoolingRequest(f"{name}{i}", (f"text {i}",)) for i in range(NUM_REQUESTS)]
    answers = asyncio.gather(*map(model.send, requests))
    first, *_ = await reached(folder, f"held-{name}*", NUM_REQUESTS)
    assert not files(folder, f"call-{name}*")
    return answers, int(first.read_text())


async def expected(model: HandleBackend) -> list[tuple[PooledText, ...]]:
    requests = [PoolingRequest("alone", (f"text {i}",)) for i in range(NUM_REQUESTS)]
    return [await model.send(request) for request in requests]


async def test_requests_of_a_killed_replica_are_answered_by_its_successor(
    backend: HandleBackend, folder: Path
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        alone = await expected(backend)
        model = Failover(backend, FailoverLimits(timeout_s=DEADLINE_S))
        answers, process_id = await asked(model, folder, "killed")
        os.kill(process_id, signal.SIGKILL)
        (folder / "hold").unlink()
        found = await answers
        assert [[each.scores for each in texts] for texts in found] == [
            [pytest.approx(each.scores, abs=1e-5) for each in texts] for texts in alone
        ]


async def test_a_replica_that_serve_stops_answers_its_requests_before_it_ends(
    backend: HandleBackend, folder: Path
) -> None:
    async with asyncio.timeout(DEADLINE_S):
        alone = await expected(backend)
        answers, process_id = await asked(backend, folder, "drained")
        serve.delete(MODEL, _blocking=False)
        await reached(folder, f"stopping-{process_id}")  # Serve has seen no request of its own
        assert not answers.done()
        (folder / "hold").unlink()
        found = await answers
        assert [[each.num_tokens for each in texts] for texts in found] == [
            [each.num_tokens for each in texts] for texts in alone
        ]
