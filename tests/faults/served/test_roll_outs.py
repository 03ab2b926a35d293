"""The file is deployed again while clients ask one question after the other.

test_scale_down.py changes what replicas need not be replaced for.
"""

import asyncio
import itertools
import shutil
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.faults.served.answer import Answer, opened, read
from tests.faults.served.kinds import SEEDED, Body, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, reached
from tests.faults.served.sizes import MODEL_SECTION, NUM_REPLICAS
from tests.measured import Record
from tests.ray.serve_run import ROOT

NUM_CLIENTS = 4
NAMES = ("os.path.join", "os.stat", "json.dumps")
BODIES: tuple[Body, ...] = tuple(
    about(name, max_tokens=200, **sampling) for name in NAMES for sampling in ({}, SEEDED)
)
GRACE_S = 60


class Load:
    """Clients that ask again and again, each whole answer kept with its question."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.answers: list[tuple[Body, Answer]] = []
        self.waits_s: list[float] = []
        self._client = client
        self._is_over = False

    async def ask(self, start: int) -> None:
        for body in itertools.islice(itertools.cycle(BODIES), start, None):
            if self._is_over:
                return
            asked_s = time.monotonic()
            async with opened(self._client, body) as stream:
                await stream.read_tokens(1)
                self.waits_s.append(time.monotonic() - asked_s)
                self.answers.append((body, await stream.read_to_end()))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as clients:
            for start in range(NUM_CLIENTS):
                clients.create_task(self.ask(start))
            yield
            self._is_over = True


async def known_answers(client: httpx.AsyncClient) -> dict[tuple[Any, str], object]:
    """Return the essence of each undisturbed answer, by fingerprint and body."""
    answers = await asyncio.gather(*(read(client, body) for body in BODIES))
    pairs = zip(BODIES, answers, strict=True)
    return {(fingerprint_of(answer), str(body)): answer.essence for body, answer in pairs}


def fingerprint_of(answer: Answer) -> object:
    ((*_, fingerprint),) = answer.heads
    return fingerprint


def check(load: Load, known: dict[tuple[Any, str], object], record: Record) -> None:
    """Fail unless each answer is, as a whole, one of a version's undisturbed answers."""
    for body, answer in load.answers:
        assert answer.essence == known[fingerprint_of(answer), str(body)]
    moved = [answer for _, answer in load.answers if answer.lost_at]
    record("requests, all whole and of one version", len(load.answers))
    record("streams moved", len(moved))
    record("longest pause, s", round(max(each.longest_gap_s for _, each in load.answers), 2))
    record("longest time to the first event, s", round(max(load.waits_s), 2))


def lower_a_limit(deployed: Deployed, folder: Path) -> None:
    deployed.application["args"]["limits"]["max_num_stops"] = 8


def add_a_model(deployed: Deployed, folder: Path) -> None:
    deployed.models.append(classifier())


def replace_the_weights(deployed: Deployed, folder: Path) -> None:
    deployed.models[0]["source"] = str(other_weights(folder))


@pytest.mark.parametrize(
    ("change", "num_versions"),
    [
        pytest.param(lower_a_limit, 1, marks=pytest.mark.soak),
        pytest.param(add_a_model, 1, marks=pytest.mark.soak),
        (replace_the_weights, 2),
    ],
)
async def test_no_request_fails_while_the_file_is_deployed_again(
    client: httpx.AsyncClient,
    deployed: Deployed,
    replicas: Replicas,
    record: Record,
    tmp_path: Path,
    change: Callable[[Deployed, Path], None],
    num_versions: int,
) -> None:
    known = await known_answers(client)
    # Replicas that are stopped have the time that was configured before.
    deployed.section(MODEL_SECTION)["graceful_shutdown_timeout_s"] = GRACE_S
    await deployed.apply()
    await deployed.settled()
    before = replicas.alive
    load = Load(client)
    async with load.running():
        change(deployed, tmp_path)
        await deployed.apply()
        await deployed.settled()
    known |= await known_answers(client)
    check(load, known, record)
    assert len({fingerprint_of(answer) for _, answer in load.answers}) == num_versions
    models = {each["id"] for each in (await client.get("/v1/models")).json()["data"]}
    assert models == {each["id"] for each in deployed.models}
    await reached(lambda: not set(before) & set(replicas.alive))  # Serve replaces all replicas
    await replicas.complete(NUM_REPLICAS)


def classifier() -> dict[str, Any]:
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    models = document["applications"][0]["args"]["models"]
    (found,) = (each for each in models if each["id"] == "pydoc-detector")
    return {**found, "num_cpus": 0.1}


def other_weights(folder: Path) -> Path:
    """Return a copy of the chat model in which a few weights differ."""
    copy = shutil.copytree(ROOT / "models" / "pydoc-chat", folder / "pydoc-chat")
    path = copy / "model.safetensors"
    weights = load_file(path)
    random = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        noise = torch.randn(weight.shape, generator=random) * 0.02
        weights[name] = weight + noise.to(weight.dtype) if weight.ndim > 1 else weight
    save_file(weights, path, metadata={"format": "pt"})
    return copy
