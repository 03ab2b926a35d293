"""Streams that lose their replica after each of their first 65 tokens are what they were to be.

Every kind of answer is cut at every index from 0 to 64 (with vLLM, at 12 of them), and cut again
while it resumes. A stream may move eight times, so each run is cut at four indexes, twice each; one
loss of a run is a death, after which the stream is a suspect, and the others are graceful stops.

A stream that is parked, or displaced and let in again, at each index in one run (with vLLM, at
four) is the same, too, and the replicas count its tokens once.
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from deployments.generator_replica import GeneratorReplica
from tests.engines import EngineName, chat_model, only_raystream, shallow
from tests.faults.cut_replicas import Cut, Cuts, Displace, Loss, Park, two_replicas
from tests.images import data_uri
from tests.serve_app.sse_decoder import SseDecoder, events_of

FOLDER = Path(__file__).resolve().parents[2] / "models/pydoc-chat"
CHAT, COMPLETIONS, PLAIN = "/v1/chat/completions", "/v1/completions", "/text-generation"
NUM_RUNS = 17
RUNS: Mapping[EngineName, tuple[int, ...]] = {
    "raystream": tuple(range(NUM_RUNS)),
    "vllm": (0, 1, 7),
}
"""The numbers of the runs that each kind of answer is cut in."""
NUM_TOKENS = 66
"""One more than the last cut needs."""
PARKED_AT: Mapping[EngineName, Sequence[int]] = {"raystream": range(65), "vllm": (0, 1, 7, 37)}
"""The indexes at which an answer of each kind is parked, or displaced."""
COUNTED = ("vllm_prompt_tokens_total", "vllm_generation_tokens_total", "vllm_request_success_total")
"""Counters of replicas that an answer adds to."""

LOGPROB_TOLERANCE = 1e-4
IDS = count()

TEXT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    "max_tokens": NUM_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
}
SEEDED: dict[str, Any] = {**TEXT, "temperature": 1.2, "seed": 7}
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40, "maxLength": 60},
        "depths": {"type": "array", "items": {"type": "integer"}, "minItems": 20, "maxItems": 40},
    },
    "required": ["name", "depths"],
    "additionalProperties": False,
}
CALL = {"type": "function", "function": {"name": "look_up", "parameters": OBJECT}}
PICTURE = {"url": data_uri(Image.new("RGB", (32, 32), "red"))}
LOOK = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": PICTURE}]

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, TEXT),
    "seeded": (CHAT, SEEDED),
    "json schema": (
        CHAT,
        {
            **SEEDED,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "o", "schema": OBJECT},
            },
        },
    ),
    "regex": (CHAT, {**SEEDED, "structured_outputs": {"regex": "[a-f]{220,}(x[0-9]{50,})?"}}),
    "tools": (CHAT, {**SEEDED, "tools": [CALL], "tool_choice": "required"}),
    "stop": (CHAT, {**SEEDED, "stop": ["\0 a stop string of the text"]}),
    "n=3": (CHAT, {**SEEDED, "n": 3}),
    "logprobs": (CHAT, {**SEEDED, "logprobs": True, "top_logprobs": 3}),
    "min_tokens": (CHAT, {**TEXT, "ignore_eos": False, "min_tokens": NUM_TOKENS - 1}),
    "penalties": (
        CHAT,
        {
            **SEEDED,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.7,
            "repetition_penalty": 1.2,
            "logit_bias": {"100": 1.5},
        },
    ),
    "image": (CHAT, {**TEXT, "messages": [{"role": "user", "content": LOOK}]}),
    "completions": (
        COMPLETIONS,
        {
            **{key: SEEDED[key] for key in SEEDED if key != "messages"},
            "prompt": ["def join(", "import os"],
            "logprobs": 2,
            "echo": False,
        },
    ),
    "text-generation": (
        PLAIN,
        {"model": "m", "prompt": "def join(", "max_tokens": NUM_TOKENS, "seed": 3},
    ),
}


@pytest.fixture(scope="module")
def replicas(
    cuts: Cuts, tmp_path_factory: pytest.TempPathFactory, engine_name: EngineName
) -> Iterator[list[GeneratorReplica]]:
    made_in = tmp_path_factory.mktemp("chat")
    folder = shallow(chat_model(engine_name, made_in), made_in)
    # Without shared prefixes, the number of cached tokens does not depend on earlier requests.
    limits = {"max_model_len": 384, "max_num_seqs": 16, "prefix_caching": False}
    with two_replicas(folder, cuts, engine_name, **limits) as made:
        yield made


def cuts_of_run(number: int, num_runs: int = NUM_RUNS) -> list[Cut]:
    """Return the cuts of one run; all runs together cut at each index from 0 on."""
    return [
        Cut(at, is_death=is_first and turn == number % 4)
        for turn, at in enumerate(range(number, 4 * num_runs, num_runs))
        for is_first in (True, False)
    ]


async def ask(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any], cuts: Cuts, run: Sequence[Loss]
) -> tuple[dict[str, Any], int]:
    """Return what a stream tells, and how often it says that it has moved or was parked."""
    request_id = f"cut{next(IDS)}"
    cuts.plan(request_id, run)
    options = {} if path == PLAIN else {"stream_options": {"include_usage": True}}
    answer = await client.post(
        path, json={**body, **options, "stream": True}, headers={"x-request-id": request_id}
    )
    assert answer.status_code == 200, answer.text
    decoder = SseDecoder()
    decoder.feed(answer.content)
    num_told = sum(comment in ("moved", "parked") for comment in decoder.comments)
    return told(events_of(answer.content)), num_told


def told(events: list[Any]) -> dict[str, Any]:
    """Return what a stream tells, however its events are cut."""
    assert events[-1] == "[DONE]", events[-1]
    found: dict[str, Any] = defaultdict(str)
    found["logprobs"] = []
    for event in events[:-1]:
        found["usage"] = event.get("usage")
        found["text"] += event.get("text", "")
        found["total"] = event.get("total_token_count")
        for choice in event.get("choices", ()):
            add_choice(found, choice)
    ids = {(e["id"], e["created"]) for e in events[:-1] if "id" in e}
    assert len(ids) <= 1
    return dict(found)


def add_choice(found: dict[str, Any], choice: dict[str, Any]) -> None:
    index = choice["index"]
    delta = choice.get("delta", choice)
    for key in ("content", "text", "reasoning_content"):
        found[f"{index} {key}"] += delta.get(key) or ""
    for call in delta.get("tool_calls", ()):
        for key, value in call["function"].items():
            found[f"{index} call {call['index']} {key}"] += value
    if choice["finish_reason"] is not None:
        found[f"{index} finish"] += choice["finish_reason"]
    logprobs = choice.get("logprobs") or {}
    entries = logprobs.get("content") or zip(
        logprobs.get("tokens", ()), logprobs.get("token_logprobs", ()), strict=True
    )
    for entry in entries:
        token, logprob = entry if isinstance(entry, tuple) else (entry["token"], entry["logprob"])
        found[f"{index} tokens"] += f"{token}|"
        found["logprobs"].append((index, len(found[f"{index} tokens"]), logprob))


def assert_equal(found: dict[str, Any], undisturbed: dict[str, Any]) -> None:
    assert {**found, "logprobs": 0} == {**undisturbed, "logprobs": 0}
    mine, theirs = sorted(found["logprobs"]), sorted(undisturbed["logprobs"])
    assert [entry[:2] for entry in mine] == [entry[:2] for entry in theirs]
    assert [entry[2] for entry in mine] == pytest.approx(
        [entry[2] for entry in theirs], abs=LOGPROB_TOLERANCE
    )


async def body_of(client: httpx.AsyncClient, kind: str) -> tuple[str, dict[str, Any]]:
    path, body = KINDS[kind]
    if kind == "stop":
        text = (await client.post(path, json=SEEDED)).json()["choices"][0]["message"]["content"]
        at = 3 * len(text) // 4
        body = {**body, "stop": [*body["stop"], text[at : at + 12]]}
    return path, body


async def check_a_stream(
    client: httpx.AsyncClient, cuts: Cuts, kind: str, numbers: Sequence[int]
) -> None:
    """Compare the streams of some runs with the undisturbed one."""
    path, body = await body_of(client, kind)
    undisturbed, num_moves = await ask(client, path, body, cuts, [])
    assert num_moves == 0
    num_made = cuts.num_made
    planned = [cuts_of_run(number) for number in numbers]
    for found, num_moves in await asyncio.gather(
        *(ask(client, path, body, cuts, run) for run in planned)
    ):
        assert_equal(found, undisturbed)
        assert num_moves > 0
    num_answers = sum(key.endswith("finish") for key in undisturbed) or 1
    num_cuts = num_answers * sum(cut.num_tokens < NUM_TOKENS - 1 for run in planned for cut in run)
    is_short = kind == "stop"  # its text ends before the last cuts
    assert cuts.num_made - num_made >= num_cuts // (2 if is_short else 1)


async def check_a_parked_stream(
    client: httpx.AsyncClient,
    cuts: Cuts,
    replicas: Sequence[GeneratorReplica],
    kind: str,
    run: Sequence[Park | Displace],
) -> None:
    """Compare a stream that makes room for others, and what is counted, with the undisturbed."""
    path, body = await body_of(client, kind)
    before = await counted(replicas)
    undisturbed, _ = await ask(client, path, body, cuts, [])
    between, num_made, resumed = await counted(replicas), cuts.num_made, num_resumed(replicas)
    found, num_told = await ask(client, path, body, cuts, run)
    after, num_cuts = await counted(replicas), cuts.num_made - num_made
    assert_equal(found, undisturbed)
    assert between - before == after - between
    num_answers = sum(key.endswith("finish") for key in undisturbed) or 1
    is_short = kind == "stop"  # its text ends before the last cuts
    assert num_cuts >= num_answers * len(run) // (2 if is_short else 1)
    num_leaving = num_cuts if isinstance(run[0], Park) else 0
    assert num_resumed(replicas) - resumed == num_leaving
    # A stream that waits for long says so again.
    assert num_told >= num_leaving if num_leaving else num_told == 0
    for replica in replicas:
        assert replica._admission.num_running == replica._admission.num_waiting == 0


def num_resumed(replicas: Sequence[GeneratorReplica]) -> int:
    """Return how many sequences the engines have taken over from another."""
    return sum(replica._engine.stats.num_resumed for replica in replicas)


async def counted(replicas: Sequence[GeneratorReplica]) -> Counter[str]:
    """Return what all replicas together have counted."""
    found = Counter[str]()
    for replica in replicas:
        series = (await replica.read_metrics()).series
        for name in COUNTED:
            found[name] += int(sum(values[-1] for _, values in series[name]))
    return found


async def check_a_whole_answer(client: httpx.AsyncClient, cuts: Cuts, kind: str) -> None:
    """Compare the whole answers of three runs with the undisturbed one."""
    path, body = await body_of(client, kind)
    body = {**body, "stream": False}
    whole = (await client.post(path, json=body)).json()

    async def cut(number: int) -> dict[str, Any]:
        request_id = f"cut{next(IDS)}"
        cuts.plan(request_id, cuts_of_run(number))
        answer = await client.post(path, json=body, headers={"x-request-id": request_id})
        found: dict[str, Any] = answer.json()
        return found

    num_made = cuts.num_made
    for answer in await asyncio.gather(cut(0), cut(5), cut(16)):
        assert lasting(answer) == lasting(whole)
    assert cuts.num_made - num_made >= 3 * 6


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "image"])
async def test_an_answer_is_the_undisturbed_one_wherever_it_is_cut(
    client: httpx.AsyncClient,
    cuts: Cuts,
    replicas: list[GeneratorReplica],
    engine_name: EngineName,
    kind: str,
) -> None:
    await check_a_stream(client, cuts, kind, RUNS[engine_name])
    for replica in replicas:
        assert replica._admission.num_running == replica._admission.num_waiting == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tools", "n=3", "text-generation", "completions"])
async def test_a_whole_answer_is_the_undisturbed_one(
    client: httpx.AsyncClient, cuts: Cuts, kind: str
) -> None:
    await check_a_whole_answer(client, cuts, kind)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [Park, Displace])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "image"])
async def test_an_answer_is_the_undisturbed_one_wherever_it_is_parked_or_displaced(
    client: httpx.AsyncClient,
    cuts: Cuts,
    replicas: list[GeneratorReplica],
    engine_name: EngineName,
    kind: str,
    loss: type[Park | Displace],
) -> None:
    run = [loss(at) for at in PARKED_AT[engine_name]]
    await check_a_parked_stream(client, cuts, replicas, kind, run)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["seeded", "regex", "n=3", "logprobs"])
async def test_replicas_may_be_lost_before_and_after_a_stream_is_parked(
    client: httpx.AsyncClient, cuts: Cuts, kind: str
) -> None:
    path, body = await body_of(client, kind)
    undisturbed, _ = await ask(client, path, body, cuts, [])
    run: list[Loss] = [
        *(Cut(0, is_death=True), Park(0), Displace(1), Cut(2, is_death=False), Park(2), Park(3)),
        *(Cut(20, is_death=True), Displace(20), Park(20), Cut(60, is_death=False), Park(64)),
    ]
    num_made = cuts.num_made
    found, _ = await ask(client, path, body, cuts, run)
    assert_equal(found, undisturbed)
    assert cuts.num_made - num_made == len(run) * (3 if kind == "n=3" else 1)


@only_raystream("images are refused with vLLM")
@pytest.mark.slow
async def test_an_answer_about_an_image_is_the_undisturbed_one(
    client: httpx.AsyncClient, cuts: Cuts, replicas: list[GeneratorReplica]
) -> None:
    await check_a_stream(client, cuts, "image", RUNS["raystream"])
    await check_a_whole_answer(client, cuts, "image")
    for loss in (Park, Displace):
        run = [loss(at) for at in PARKED_AT["raystream"]]
        await check_a_parked_stream(client, cuts, replicas, "image", run)


def lasting(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer without what differs between any two answers."""
    differing = {"id", "created", "time", "token_rate"}
    kept = {key: answer[key] for key in answer if key not in differing}
    for choice in kept.get("choices", ()):
        for call in choice.get("message", {}).get("tool_calls", ()):
            call.pop("id", None)
        choice.pop("logprobs", None)
    return kept
