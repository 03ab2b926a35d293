"""Batches of four kinds beside deaths of replicas and ingresses, a redeploy and a restart."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.free_port import free_port
from serve_app.commands.run.supervise import STOP_S
from tests.changing_server import ChangingServer
from tests.engines import shallow
from tests.faults.batch_client import BatchClient
from tests.faults.served.batch_faults import BatchFaults
from tests.faults.served.batch_load import BATCH, NUM_BAD, BatchLoad, Outcome, check
from tests.faults.served.conftest import config
from tests.faults.served.fragile_server import client_of
from tests.faults.served.ingresses import Ingresses
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import FOLDER, Replicas
from tests.measured import Record
from tests.ray.serve_run import (
    READY_DEADLINE_S,
    ROOT,
    SERVE_RUN,
    STOP_DEADLINE_S,
    Server,
    haproxy_environment,
    wait_until,
)

FEW = {"chat": 24, "json_schema": 6, "classify": 5, "embeddings": 5}
MANY = {"chat": 980, "json_schema": 400, "classify": 300, "embeddings": 300}
NUM_INGRESSES = 2
KILL_INTERVAL_S = 10


def shipped() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    return document


async def undisturbed(client: BatchClient, num_good: dict[str, int]) -> dict[str, Outcome]:
    """Return how the batches end when nothing happens."""
    load = BatchLoad(client, num_good)
    await load.start()
    outcomes = await load.outcomes()
    for name, outcome in outcomes.items():
        assert outcome.counts == {
            "total": num_good[name] + NUM_BAD,
            "completed": num_good[name],
            "failed": NUM_BAD,
        }
    return outcomes


@contextmanager
def held(replicas: Replicas) -> Iterator[None]:
    """Slow chats down, so that the batch does not end while what was killed starts again."""
    replicas.hold(BATCH)
    yield
    replicas.release(BATCH)


class Restarted:
    """A server that can be stopped and started again."""

    def __init__(self, folder: Path, document: dict[str, Any], running: ExitStack) -> None:
        self._folder = folder
        self._document = document
        self._running = running
        self._num_starts = 0
        self.server = self._start()

    def deployed(self) -> Deployed:
        """Return the file that the server was started with, which may be changed and deployed."""
        return Deployed.of(self.server, self._folder, self._document)

    def restart(self) -> float:
        """Stop the server in order and start it again; return how many seconds the stop took."""
        os.killpg(self.server.process.pid, signal.SIGINT)
        stop_s = wait_until(self.server.has_ended, STOP_S + STOP_DEADLINE_S)
        assert self.server.survivors() == []
        self.server = self._start()
        return stop_s

    def _start(self) -> Server:
        self._num_starts += 1
        path = self._folder / "serve_config.yaml"
        path.write_text(yaml.safe_dump(self._document))
        environment = {**os.environ, "HOME": str(self._folder), FOLDER: str(self._folder)}
        environment |= haproxy_environment()
        log = self._folder / f"serve-{self._num_starts}.log"
        server = Server(path, log, environment, SERVE_RUN)
        self._running.callback(server.kill)
        wait_until(server.is_ready, READY_DEADLINE_S)
        return server


@pytest.fixture
def shipped_server(tmp_path: Path) -> Iterator[Restarted]:
    """Start the shipped models with two chat replicas, two ingresses and a folder for jobs.

    The chat replicas are fragile ones, which can be held.
    """
    Replicas.watched_in(tmp_path)
    document = shipped()
    document["http_options"]["port"] = free_port()
    application = document["applications"][0]
    application["import_path"] = "tests.faults.served.build:build"
    application["args"]["jobs"] = {"folder": str(tmp_path / "jobs"), "max_running_lines": 16}
    counts = {"Ingress": NUM_INGRESSES, "pydoc-chat": 2}
    for section in application["deployments"]:
        if section["name"] in counts:
            del section["autoscaling_config"]
            section["num_replicas"] = counts[section["name"]]
    application["deployments"][0]["ray_actor_options"]["num_cpus"] = 0.1
    for model in application["args"]["models"]:
        model["num_cpus"] = 0.3
    with ExitStack() as running:
        yield Restarted(tmp_path, document, running)


@pytest.fixture(scope="module")
def server(changing_server: ChangingServer, folder: Path) -> Iterator[Server]:
    """Serve all shipped models, the chat model with two layers, and a folder for jobs.

    No module of the package comes earlier, so the suite's server starts with this file.
    """
    document = config()
    args = document["applications"][0]["args"]
    args["jobs"] = {"folder": str(folder / "jobs"), "max_running_lines": 2}
    (chat,) = args["models"]
    chat["source"] = str(shallow(ROOT / chat["source"], folder))
    for model in shipped()["applications"][0]["args"]["models"]:
        if model["id"] != "pydoc-chat":
            args["models"].append({**model, "num_cpus": 0.1})
    with changing_server.serve_meanwhile(document) as server:
        yield server


async def test_batches_outlast_a_killed_replica_and_a_redeploy(
    deployed: Deployed, replicas: Replicas, server: Server, record: Record
) -> None:
    replicas.release(BATCH)
    faults = BatchFaults(server, deployed)
    async with client_of(server) as http:
        client = BatchClient(http)
        expected = await undisturbed(client, FEW)
        replicas.hold(BATCH)
        load = BatchLoad(client, FEW)
        await load.start()
        num_running = [await load.until(0.4)]
        await faults.kill_a_replica("pydoc-chat")
        num_running.append(await load.until(0.5))
        await faults.redeploy()
        record("batches that ran at the kill and at the redeploy", num_running)
        record("batches that ran after it", await load.until(0))
        replicas.release(BATCH)
        check(await load.outcomes(), expected)
    assert all(num_running)


@pytest.mark.soak
async def test_2000_lines_outlast_kills_of_everything_a_restart_and_a_redeploy(
    shipped_server: Restarted, tmp_path: Path, record: Record
) -> None:
    server, replicas = shipped_server.server, Replicas(tmp_path)
    replicas.release(BATCH)
    async with client_of(server) as http:
        client = BatchClient(http)
        expected = await undisturbed(client, MANY)
        load = BatchLoad(client, MANY)
        await load.start()
        num_running = []
        faults = BatchFaults(server, shipped_server.deployed())
        async with faults.killing(KILL_INTERVAL_S):
            for share, victim in zip((0.1, 0.2), Ingresses(server).processes(), strict=True):
                num_running.append(await load.until(share))
                with held(replicas):
                    await faults.kill_ingress(victim, NUM_INGRESSES)
            num_running.append(await load.until(0.3))
            with held(replicas):
                await faults.redeploy()
            num_running.append(await load.until(0.5))
        stop_s = await asyncio.to_thread(shipped_server.restart)
        again = BatchFaults(
            shipped_server.server, shipped_server.deployed(), faults.num_killed, faults.random
        )
        async with again.killing(KILL_INTERVAL_S):
            num_running.append(await load.until(0.6))
            outcomes = await load.outcomes()
        record("replicas killed, by model", faults.num_killed)
        record("batches that ran at each fault", num_running)
        record("the stop took, s", round(stop_s, 1))
        check(outcomes, expected)
        assert all(num_running)
        assert sum(faults.num_killed.values()) >= 2  # one before the restart, one after
