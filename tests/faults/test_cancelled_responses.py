"""A response that is cancelled in the background leaves its replica, with all of its memory.

The replica is a real one whose sequences don't advance, so only an abort can end them.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from deployments.engine.engine import Engine
from deployments.generator_replica import GeneratorReplica
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.local_handle import local_backend
from tests.faults import test_lost_at_each_token
from tests.measured import Record
from tests.serve_app.api.batches.test_routes import eventually, running
from tests.serve_app.apps import AppClient
from tests.serve_app.local_replica import local_generator

RESPONSES = "/v1/responses"
NUM_RESPONSES = 3
STEP_S = 0.005


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[GeneratorReplica]:
    step, pause = Engine.step, Event()

    def standing_step(self: Engine) -> Any:
        if self.stats.num_waiting:  # it takes in what has come, however late
            return step(self)
        pause.wait(STEP_S)
        return []

    folder = test_lost_at_each_token.FOLDER
    with local_generator(folder, max_model_len=384, max_num_seqs=4) as made:
        monkeypatch.setattr(Engine, "step", standing_step)
        yield made


async def begin(client: AppClient, at: int) -> str:
    body = {"input": f"What does the function number {at} do?", "background": True}
    id_ = (await client.ask(RESPONSES, {**body, "max_output_tokens": 300})).json()["id"]
    return str(id_)


@pytest.mark.parametrize("is_other", [False, True], ids=["same ingress", "other ingress"])
async def test_cancelling_frees_the_memory_of_the_replica_through_any_ingress(
    generator: GeneratorReplica, tmp_path: Path, record: Record, is_other: bool
) -> None:
    config = AppConfig.model_validate(
        {"models": [{"id": "m", "source": "nowhere"}], "jobs": {"folder": str(tmp_path / "jobs")}}
    )
    admission, engine = generator._admission, generator._engine

    def num_held() -> int:
        stats = engine.stats
        in_engine = stats.num_running + stats.num_waiting
        return in_engine + admission.num_running + admission.num_waiting

    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(1 + is_other):
            backend = await stack.enter_async_context(aclosing(local_backend(generator)))
            app = build_app(AppParts(config, {"m": backend}))
            clients.append(await stack.enter_async_context(running(app)))
            if len(clients) == 1:  # it claims them all before there is another
                ids = [await begin(clients[0], at) for at in range(NUM_RESPONSES)]
                await eventually(lambda: engine.stats.num_running == NUM_RESPONSES)
        assert engine.stats.kv_usage > 0
        now_s = asyncio.get_running_loop().time
        began_s = now_s()
        for id_ in ids:
            await clients[-1].ask(f"{RESPONSES}/{id_}/cancel", None)
        await eventually(lambda: num_held() == 0)
        record("until the replica was free, s", round(now_s() - began_s, 2))
        assert engine.stats.kv_usage == 0
        for id_ in ids:
            told = (await clients[-1].get(f"{RESPONSES}/{id_}")).json()
            assert (told["status"], told["output"]) == ("cancelled", [])
