"""Streams of all kinds on two replicas with vLLM, of which one is harmed under them.

The replicas stop each answer after as many tokens as a test wants delivered (`FragileVllm`), and
the memory holds the answers of two replicas, but not those of both on one: whatever moves makes
others wait, and be preempted.
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import httpx
import psutil
import pytest
from transformers import AutoModelForCausalLM

from serve_app.commands.check.compose import VLLM_MODEL
from tests.changing_server import ChangingServer
from tests.engines import chat_model, keys_of
from tests.faults.served.answer import Answer, assert_equal, opened, read
from tests.faults.served.conftest import config
from tests.faults.served.devices import shown
from tests.faults.served.fragile_server import client_of
from tests.faults.served.kinds import KINDS, SEEDED, Body, about, split_stop
from tests.faults.served.redeploy import Deployed
from tests.faults.served.replicas import Replicas, is_alive, kill, reached
from tests.measured import Record
from tests.ray.serve_run import Server
from tests.vllm_engine.tiny_adapters import save_adapter

pytestmark = [pytest.mark.vllm, pytest.mark.processes, pytest.mark.slow]

NUM_REPLICAS = 2
NUM_STREAMS = 16
MODEL, ADAPTER = "pydoc-chat", "pydoc-adapter"
NUM_KV_BYTES = 32 * 128 * 3072
"""Memory for 32 blocks of 128 tokens."""

ENDS_S = 5
"""How long the processes of a killed replica may last."""

SETTLED_S = 600
"""How long the replicas of a file may take that was changed twice: four starts, one at a time."""

LEAVING_S = 300
"""How long replicas may take to end that are replaced one after the other, each with a start."""

NOTICED_S = 25
"""How long it may take until a replica has ended whose engine has died or hangs."""


def document(source: str, adapter: str) -> dict[str, Any]:
    """Return the file of the tests of faults, with vLLM."""
    found = config()
    application = found["applications"][0]
    (chat,) = application["args"]["models"]
    chat |= {
        **keys_of("vllm"),
        "source": source,
        "dtype": "float32",
        "num_cpus": 0.1,
        "num_threads": 1,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": NUM_KV_BYTES,
        "adapters": [{"id": ADAPTER, "source": adapter}],
    }
    application["args"]["limits"] |= {"failover_timeout_s": 300, "stall_timeout_s": 300}
    (section,) = (each for each in application["deployments"] if each["name"] == MODEL)
    section |= {**VLLM_MODEL, "num_replicas": NUM_REPLICAS, "graceful_shutdown_timeout_s": 20}
    return found


@pytest.fixture(scope="module")
def server(changing_server: ChangingServer, tmp_path_factory: pytest.TempPathFactory) -> Server:
    source = chat_model("vllm", tmp_path_factory.mktemp("chat"))
    layers = AutoModelForCausalLM.from_pretrained(source).model.layers
    folder = tmp_path_factory.mktemp("adapters") / ADAPTER
    adapter = save_adapter(folder, 1, ("q_proj", "v_proj"), layers, scale=0.1)
    return changing_server.serve(document(str(source), str(adapter)))


@pytest.fixture
async def client(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(server) as client:
        yield client


@pytest.fixture
async def replicas(changing_server: ChangingServer, server: Server) -> Replicas:
    """Wait until both replicas live and have nothing to do."""
    replicas = Replicas(changing_server.folder)
    await asyncio.to_thread(changing_server.settle, SETTLED_S)
    await replicas.complete(NUM_REPLICAS)
    await reached(lambda: replicas.are_idle)
    return replicas


@pytest.fixture
async def deployed(changing_server: ChangingServer, server: Server) -> AsyncIterator[Deployed]:
    async with changing_server.changeable() as deployed:
        yield deployed


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[Body, Answer]]:
    """Return the streams that nothing has disturbed, by name, once a test has read them."""
    return {}


@pytest.fixture
async def undisturbed(
    client: httpx.AsyncClient, replicas: Replicas, answers: dict[str, tuple[Body, Answer]]
) -> Mapping[str, tuple[Body, Answer]]:
    """Read all streams, so few at a time that none is preempted."""
    if not answers:
        bodies = await bodies_of(client)
        for name, body in bodies.items():
            answers[name] = (body, await read(client, body))
        assert (await shown(client)).total("num_preempted") == 0
    return answers


async def bodies_of(client: httpx.AsyncClient) -> dict[str, Body]:
    """Return sixteen requests of eleven kinds, and one of an adapter."""
    asked = about("os.path.join", **SEEDED, logprobs=True)
    logprobs = (await read(client, asked)).choices[0].logprobs
    stop = split_stop([token["token"] for token, *_ in logprobs], 250)
    kinds = {name: body for name, body in KINDS.items() if name != "image"}
    kinds["stop"] = {**asked, "stop": [stop]}
    others = [
        {**body, "seed": 99, "temperature": 1.1} for body in kinds.values() if "stop" not in body
    ]
    again = {f"again {i}": each for i, each in enumerate(others[: NUM_STREAMS - len(kinds)])}
    adapted = about("os.path.join", **SEEDED, model=ADAPTER)
    return {**kinds, **again, "adapter": {**adapted, "model": ADAPTER}}


def engine_of(replica: int) -> int:
    """Return the process of a replica's EngineCore."""
    children = psutil.Process(replica).children()
    (found,) = (each.pid for each in children if "EngineCore" in " ".join(each.cmdline()))
    return found


Harm = Callable[[int, Deployed], Awaitable[None]]


async def kill_replica(victim: int, deployed: Deployed) -> None:
    kill(victim)


async def kill_engine(victim: int, deployed: Deployed) -> None:
    kill(engine_of(victim))


async def stop_engine(victim: int, deployed: Deployed) -> None:
    os.kill(engine_of(victim), signal.SIGSTOP)


async def drain(victim: int, deployed: Deployed) -> None:
    deployed.section(MODEL)["num_replicas"] = 1
    await deployed.apply()


async def redeploy(victim: int, deployed: Deployed) -> None:
    deployed.application["args"]["limits"]["max_num_stops"] = 8
    await deployed.apply()


DEATHS = (kill_replica, kill_engine, stop_engine)
AT = (0, 1, 7, 37)
SHORT = {(7, kill_replica), (37, kill_engine)}
CASES = [
    pytest.param(at, harm, marks=() if (at, harm) in SHORT else pytest.mark.soak)
    for harm in (*DEATHS, drain, redeploy)
    for at in AT
]


@pytest.mark.parametrize(("at", "harm"), CASES)
async def test_streams_of_eleven_kinds_are_equal_whatever_happens_to_a_replica(
    client: httpx.AsyncClient,
    replicas: Replicas,
    deployed: Deployed,
    undisturbed: Mapping[str, tuple[Body, Answer]],
    record: Record,
    at: int,
    harm: Harm,
) -> None:
    name = f"stop-at-{at}-{uuid4().hex}"
    bodies, expected = zip(*undisturbed.values(), strict=True)
    ids = [f"{name}-{i}" for i in range(len(bodies))]
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(opened(client, body, request_id=id_))
            for body, id_ in zip(bodies, ids, strict=True)
        ]
        num_sequences = sum(body.get("n", 1) for body in bodies)
        await reached(lambda: replicas.num_stopped(name) == num_sequences)
        used = Counter(pid for id_ in ids for pid in replicas.runs_of(id_))
        assert len(used) == NUM_REPLICAS
        ((victim, _),) = used.most_common(1)
        family = [victim, *(each.pid for each in psutil.Process(victim).children(recursive=True))]
        await harm(victim, deployed)
        # Nothing is released before: what a lost replica ran has to go on elsewhere.
        if harm in DEATHS:
            ends_s = ENDS_S if harm is kill_replica else NOTICED_S
            gone_s = await reached(lambda: not any(map(is_alive, family)), ends_s)
        else:
            num_left = 0 if harm is redeploy else NUM_REPLICAS - 1
            gone_s = await reached(lambda: sum(map(is_alive, used)) == num_left, LEAVING_S)
        record("until its processes had ended, s", round(gone_s, 2))
        reading = asyncio.gather(*(stream.read_to_end() for stream in streams))
        replicas.release(name)
        answers = await reading
    assert_equal(answers, expected)
    num_moved = sum(bool(answer.lost_at) for answer in answers)
    assert num_moved > 0
    record("streams moved", num_moved)
    # Those of the lost replica went with it: `test_engine` forces preemptions and compares.
    record("preemptions", (await shown(client)).total("num_preempted"))
