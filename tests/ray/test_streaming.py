import asyncio
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.channel.server import ChannelServer
from deployments.contract import (
    Accepted,
    ChatMessage,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    ModelDescription,
    SamplingParams,
    TextDelta,
    TextPart,
)
from deployments.model_replica import node_address
from serve_app.config import AppConfig, ModelConfig
from serve_app.ingress import Ingress
from tests.deployments.tiny_folder import spec
from tests.ray.observed_generator import ObservedGenerator

TRICKY = "one\n\ntwo\r\n  three\t\n data: [DONE]\n👩‍👩‍👧 日本語 é\u0301 \u2028end\n"
ABORT_BUDGET_S = 0.05


class Echo:
    """Answers with the prompt's own text, one character at a time."""

    def __init__(self) -> None:
        self._channels = ChannelServer(node_address())

    async def describe(self) -> ModelDescription:
        return ModelDescription(
            "echo", 0, 1000, accepts_images=False, default_sampling=SamplingParams()
        )

    async def ping(self) -> None:
        """Report good health."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[list[GenerationEvent]]:
        message = request.prompt[0]
        assert isinstance(message, ChatMessage)
        part = message.parts[0]
        assert isinstance(part, TextPart)
        assert request.stream is not None
        address = await self._channels.address()
        with self._channels.stream(request.stream) as stream:
            yield [Accepted(1, channel=address)]
            for character in part.text:
                stream.put(TextDelta((1,), character))
                self._channels.flush()
            stream.put(TextDelta((1,), "", FinishReason.STOP))
            self._channels.flush()
            await stream.wait_until_ended()


@pytest.fixture(scope="module")
def tiny(base_url: str, tiny_folder: Path) -> Iterator[DeploymentHandle[ObservedGenerator]]:
    """Serve the tiny model and the echo behind one ingress; return the tiny model's handle."""
    config = AppConfig(
        models=(ModelConfig(id="tiny", source="tiny"), ModelConfig(id="echo", source="echo"))
    )
    options = {"num_cpus": 0.5}
    tiny = serve.deployment(name="tiny", ray_actor_options=options, max_ongoing_requests=512)(
        ObservedGenerator
    ).bind(spec(tiny_folder, max_model_len=16384))
    echo = serve.deployment(name="echo", ray_actor_options=options)(Echo).bind()
    ingress = serve.deployment(name="Ingress", ray_actor_options=options)(Ingress)
    serve.run(ingress.bind(config, {"tiny": tiny, "echo": echo}), name="streaming")
    yield serve.get_deployment_handle("tiny", "streaming")
    serve.delete("streaming")


@pytest.fixture
def client(base_url: str, tiny: object) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_text_arrives_unchanged_streamed_and_unstreamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": TRICKY}], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == TRICKY
    whole = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": TRICKY}]
    )
    assert whole.choices[0].message.content == TRICKY


def test_the_openai_client_gets_the_same_text_streamed_and_unstreamed(
    client: openai.OpenAI,
) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": "Hello"}
    ]
    whole = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=40, seed=7, temperature=1.2
    )
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,
        max_tokens=40,
        seed=7,
        temperature=1.2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    # The second request finds the first one's prompt in the cache; all else is equal.
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    details = {"prompt_tokens_details"}
    assert usage.model_dump(exclude=details) == whole.usage.model_dump(exclude=details)
    assert whole.usage.completion_tokens <= 40


def test_the_first_of_several_answers_equals_a_single_one_and_all_have_logprobs(
    client: openai.OpenAI,
) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 20,
        "seed": 7,
        "temperature": 1.2,
        "frequency_penalty": 0.5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    alone = client.chat.completions.create(**asked)
    several = client.chat.completions.create(**asked, n=3)
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == alone.choices[0].message.content
    assert len(set(texts)) == 3
    assert several.usage is not None
    assert alone.usage is not None
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens
    told = [(choice.logprobs and choice.logprobs.content) or [] for choice in several.choices]
    assert sum(map(len, told)) == several.usage.completion_tokens
    streamed: dict[int, str] = {}
    for chunk in client.chat.completions.create(**asked, n=3, stream=True):
        for choice in chunk.choices:
            text = streamed.get(choice.index, "") + (choice.delta.content or "")
            streamed[choice.index] = text
    assert [streamed[index] for index in range(3)] == texts


def test_text_generation_counts_tokens_exactly(base_url: str, tiny: object) -> None:
    body = {"prompt": "abc", "max_tokens": 25, "seed": 3, "ignore_eos": True}
    with httpx.stream("POST", f"{base_url}/text-generation", json=body, timeout=30) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1] if not line.startswith(":")]
    assert sum(event["token_count"] for event in events) == 25
    assert events[-1]["total_token_count"] == 25
    whole = httpx.post(
        f"{base_url}/text-generation", json={**body, "stream": False}, timeout=30
    ).json()
    assert whole["response"] == "".join(event["text"] for event in events)
    assert whole["token_count"] == 25


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "nobody", "messages": [{"role": "user", "content": "x"}]}, 404, "nobody"),
        ({"model": "tiny", "messages": [{"role": "user", "content": "x" * 20000}]}, 400, "16384"),
        ({"model": "tiny", "messages": [], "temperatur": 1}, 400, "temperature"),
    ],
)
def test_a_refused_stream_is_answered_with_an_error_status(
    base_url: str, tiny: object, body: dict[str, object], status: int, says: str
) -> None:
    answer = httpx.post(
        f"{base_url}/v1/chat/completions", json={**body, "stream": True}, timeout=30
    )
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def ask(base_url: str, *, stream: bool) -> socket.socket:
    """Ask for an endless answer over a plain socket, in one segment."""
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "go"}],
            "stream": stream,
            "ignore_eos": True,
        }
    ).encode()
    host = urlsplit(base_url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host.netloc}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    assert host.port is not None
    client = socket.create_connection(("127.0.0.1", host.port), timeout=30)
    client.sendall(head.encode() + body)
    return client


def open_stream(base_url: str) -> socket.socket:
    """Open a stream and return after its first text has come."""
    client = ask(base_url, stream=True)
    received = b""
    while b'"content":"' not in received.replace(b'"content":""', b""):
        received += client.recv(4096)
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot_within_50_ms(
    base_url: str, tiny: DeploymentHandle[ObservedGenerator], stream: bool
) -> None:
    delays = []
    for _ in range(7):
        client = open_stream(base_url) if stream else ask(base_url, stream=False)
        tiny.wait_until_running.remote(1).result(timeout_s=30)
        idle_at = tiny.wait_until_running.remote(0)
        left_at = time.time()
        client.close()
        delays.append(idle_at.result(timeout_s=30) - left_at)
    assert min(delays) > 0, "an answer ended by itself"
    # Each delay must be far below the whole answer's time. Other work on the machine only adds
    # time, so the shortest delay is what the system needs.
    assert max(delays) < 2
    assert min(delays) < ABORT_BUDGET_S, delays


async def test_a_client_that_leaves_does_not_affect_others(base_url: str, tiny: object) -> None:
    body = {"prompt": "same", "max_tokens": 60, "seed": 1, "ignore_eos": True, "stream": False}

    async def answer_to(client: httpx.AsyncClient) -> str:
        answer = await client.post("/text-generation", json=body)
        text: str = answer.json()["response"]
        return text

    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        alone = await answer_to(client)
        leavers = await asyncio.gather(
            *(asyncio.to_thread(open_stream, base_url) for _ in range(3))
        )
        company = [asyncio.create_task(answer_to(client)) for _ in range(4)]
        for leaver in leavers:
            leaver.close()
        assert set(await asyncio.gather(*company)) == {alone}


def test_a_stream_of_a_killed_replica_waits_for_its_successor_and_goes_on(
    base_url: str, tiny: DeploymentHandle[ObservedGenerator]
) -> None:
    body = {"prompt": "go", "ignore_eos": True, "temperature": 0, "max_tokens": 4000}
    url = f"{base_url}/text-generation"
    expected = httpx.post(url, json={**body, "stream": False}, timeout=60).json()
    victim = tiny.process_id.remote().result(timeout_s=30)
    lines: list[str] = []
    with httpx.stream("POST", url, json=body, timeout=60) as response:
        for line in response.iter_lines():
            if not lines:
                os.kill(victim, signal.SIGKILL)
            lines.append(line)
    *data, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert done == "[DONE]"
    assert "".join(json.loads(each)["text"] for each in data) == expected["response"]
    assert ": moved" in lines
    assert tiny.process_id.remote().result(timeout_s=30) != victim


def test_ready_health_and_models_list_what_is_served(base_url: str, tiny: object) -> None:
    assert httpx.get(f"{base_url}/ready", timeout=30).status_code == 200
    assert httpx.get(f"{base_url}/health", timeout=30).status_code == 200
    models = httpx.get(f"{base_url}/v1/models", timeout=30).json()
    assert [model["id"] for model in models["data"]] == ["tiny", "echo"]
