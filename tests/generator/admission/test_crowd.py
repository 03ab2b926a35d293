"""Many clients of one key, which fill a replica and its queue, never keep another key out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from deployments.generator.admission.admission import Admission
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from serve_app.keys.api_keys import KeyRing
from tests.deployments.local_handle import local_backend
from tests.deployments.tiny_folder import save_text_model
from tests.serve_app.apps import ALICE, BOB, CHAT, AppClient, bearer, key, question
from tests.serve_app.local_replica import local_generator

NUM_CLIENTS, NUM_REQUESTS = 200, 12


class Crowd:
    """Clients of one key that always ask; those that are refused ask again once there is room."""

    def __init__(self, client: AppClient, admission: Admission) -> None:
        self.num_refused = 0
        self._client = client
        self._admission = admission
        self._is_over = False
        self._has_room = asyncio.Event()

    @asynccontextmanager
    async def pressing(self) -> AsyncIterator[None]:
        """Let them ask until the block ends."""
        asking = [asyncio.create_task(self._ask_for_ever()) for _ in range(NUM_CLIENTS)]
        watching = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            self._is_over = True
            await asyncio.gather(watching, *asking)

    async def until_full(self) -> None:
        """Wait until the replica has no room for them."""
        async with asyncio.timeout(60):
            while not self._admission.is_full:  # noqa: ASYNC110 - other tasks' state
                await asyncio.sleep(0.001)

    async def _watch(self) -> None:
        while not self._is_over:
            if not self._admission.is_full:
                self._let_ask()
            await asyncio.sleep(0.001)
        self._let_ask()

    def _let_ask(self) -> None:
        self._has_room.set()
        self._has_room = asyncio.Event()

    async def _ask_for_ever(self) -> None:
        body = question(max_tokens=32, ignore_eos=True)
        while not self._is_over:
            answer = await self._client.post(CHAT, json=body, headers=bearer(ALICE))
            if answer.status_code != 200:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
                self.num_refused += 1
                if not self._is_over:
                    await self._has_room.wait()


@pytest.mark.slow
async def test_200_clients_of_a_key_never_cause_the_refusal_of_a_key_under_its_share(
    tmp_path: Path,
) -> None:
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    # With this weight, one client after the other stays under its share, whatever its prompts cost.
    keys = KeyRing((key("alice", ALICE), key("bob", BOB, weight=50)))
    folder = save_text_model(tmp_path)
    # The queue is shorter than the burst, so that all that waits may still be being encoded.
    with local_generator(folder, max_num_seqs=2, max_queued_requests=4) as generator:
        backend = local_backend(generator)
        app = build_app(AppParts(config, {"m": backend}, keys=keys))
        async with aclosing(backend), AppClient(app) as client:
            client.timeout = None
            crowd = Crowd(client, generator._admission)
            async with crowd.pressing():
                for number in range(NUM_REQUESTS):
                    await crowd.until_full()
                    body = question(max_tokens=4, ignore_eos=True)
                    answer = await client.post(CHAT, json=body, headers=bearer(BOB))
                    assert answer.status_code == 200, (number, answer.text)
    assert crowd.num_refused > NUM_CLIENTS
    assert generator._admission.num_running == generator._admission.num_waiting == 0
