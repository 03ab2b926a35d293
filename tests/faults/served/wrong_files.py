"""Files that can't be served, deployed one after the other to a server that serves.

First a `user_config` that is nonsense; then, with it, a model whose folder is missing, after which
both replicas die; then another model with damaged weights; and at last a mistyped key beside it.
"""

import asyncio
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import yaml

from tests.changing_server import ChangingServer
from tests.faults.served.answer import Answer, opened, read
from tests.faults.served.fragile_server import client_of
from tests.faults.served.in_halves import CHAT
from tests.faults.served.kinds import SEEDED, about
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import DEADLINE_S, Replicas, kill
from tests.faults.served.sizes import DETECTOR, MODEL_SECTION, NUM_REPLICAS
from tests.ray.serve_run import ROOT

NOWHERE = "/nowhere/at/all"
QUICK = about("os.stat", max_tokens=5)
LONG = about("os.path.join", **SEEDED)


@dataclass(frozen=True)
class Told:
    """What the server answers at one time."""

    replicas: list[int]  # the processes of the chat model's replicas
    answers: Mapping[str, tuple[int, Any]]  # by path: the status code, and the body as JSON
    retry_after: str | None  # the header of the classifier's answer

    def message(self, path: str) -> str:
        """Return the message of an error."""
        told: str = self.answers[path][1]["error"]["message"]
        return told


@dataclass(frozen=True)
class WrongFiles:
    """What the server said at each time."""

    before: Told  # with the file that it was started with
    nonsense: Told  # after the `user_config`
    refused: list[str | None]  # why each replica has refused that
    missing: Told  # after the missing folder
    silent_s: float  # how long after both replicas were killed `/ready` said so
    unready: Any  # what it said then, as JSON
    restored_s: float  # how long after that it said that the models are ready
    damaged: Told  # after the damaged weights
    typo: Told  # after the mistyped key
    typo_message: str  # what Serve says about it
    expected: Answer  # a long answer before all of this
    answer: Answer  # the same, which began before and ended after the missing folder


async def wrong_files(changing_server: ChangingServer, folder: Path) -> WrongFiles:
    """Deploy the files, and ask the server what it thinks of them."""
    replicas = Replicas(changing_server.folder)
    async with AsyncExitStack() as stack:
        deployed = await stack.enter_async_context(changing_server.changeable())
        await replicas.complete(NUM_REPLICAS)
        client = await stack.enter_async_context(client_of(changing_server.server))

        async def told() -> Told:
            return await _told(client, replicas)

        name = uuid4().hex
        expected = await read(client, LONG)
        before = await told()
        stream = await stack.enter_async_context(opened(client, LONG, request_id=f"held-{name}-x"))
        await stream.read_tokens(1)

        deployed.section(MODEL_SECTION)["user_config"]["max_batch_size"] = "many"
        await deployed.apply()
        _, devices = await _until(client, "/v1/devices", _shows_that_all_have_refused)
        nonsense = await told()

        source = deployed.models[0]["source"]
        deployed.models[0]["source"] = NOWHERE
        await _failed(deployed)
        missing = await told()
        replicas.release(name)
        answer = await stream.read_to_end()
        for process in missing.replicas:
            kill(process)
        silent_s, unready = await _until(client, "/ready", lambda status, _: status == 503)
        restored_s, _ = await _until(client, "/ready", lambda status, _: status == 200)

        deployed.models[0]["source"] = source
        deployed.section(MODEL_SECTION)["user_config"]["max_batch_size"] = 8
        deployed.models.append(damaged_classifier(folder))
        await _failed(deployed)
        await replicas.complete(1)
        await _until(client, "/health", _says_that_a_model_has_failed)
        damaged = await told()

        deployed.models[1]["max_queud_requests"] = 3
        typo_message = await _failed(deployed)
        await _until(client, "/health", _says_that_a_model_has_failed)
        typo = await told()
    return WrongFiles(
        before=before,
        nonsense=nonsense,
        refused=_refused(devices),
        missing=missing,
        silent_s=silent_s,
        unready=unready,
        restored_s=restored_s,
        damaged=damaged,
        typo=typo,
        typo_message=typo_message,
        expected=expected,
        answer=answer,
    )


def damaged_classifier(folder: Path) -> dict[str, Any]:
    """Return the entry of a classifier whose weights are cut off."""
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    models = document["applications"][0]["args"]["models"]
    (found,) = (each for each in models if each["id"] == DETECTOR)
    copy = shutil.copytree(ROOT / found["source"], folder / DETECTOR)
    os.truncate(copy / "model.safetensors", 1000)
    return {**found, "source": str(copy), "num_cpus": 0.1}


async def _failed(deployed: Deployed) -> str:
    """Apply the file, wait until Serve gives it up, and return what it says."""
    await deployed.apply()
    async with asyncio.timeout(DEADLINE_S):
        while (details := await deployed.details())["status"] != "DEPLOY_FAILED":  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(0.1)
    message: str = details["message"]
    return message


def _shows_that_all_have_refused(status: int, body: dict[str, Any]) -> bool:
    """Whether each replica has refused its `user_config`; Serve tells one after the other."""
    refused = _refused(body)
    return len(refused) == NUM_REPLICAS and None not in refused


def _refused(devices: dict[str, Any]) -> list[str | None]:
    """Return why each replica that answers has refused its `user_config`."""
    (model,) = devices["data"]
    return [replica["refused_user_config"] for replica in model["replicas"]]


def _says_that_a_model_has_failed(status: int, body: dict[str, Any]) -> bool:
    """Whether an ingress knows so: what the controller has told may be a second old."""
    return status == 503 and "has failed" in body["error"]["message"]


async def _until(
    client: httpx.AsyncClient, path: str, condition: Callable[[int, dict[str, Any]], bool]
) -> tuple[float, Any]:
    """Ask until an answer's status code and body are right; return the seconds, and the body."""
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async with asyncio.timeout(DEADLINE_S):
        while not condition((answer := await client.get(path)).status_code, answer.json()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return loop.time() - began_s, answer.json()


async def _told(client: httpx.AsyncClient, replicas: Replicas) -> Told:
    answers = {path: await client.get(path) for path in ("/ready", "/health", "/v1/models")}
    answers[CHAT] = await client.post(CHAT, json=QUICK)
    classified = await client.post("/v1/classify", json={"model": DETECTOR, "input": "hello"})
    answers["/v1/classify"] = classified
    return Told(
        replicas.alive,
        {path: (answer.status_code, answer.json()) for path, answer in answers.items()},
        classified.headers.get("retry-after"),
    )
