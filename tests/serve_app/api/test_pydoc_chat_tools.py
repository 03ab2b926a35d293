"""The embedded model calls tools: it was not trained to, so the grammar makes it."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import httpx
import jsonschema
import pytest
from ray import serve
from ray.serve import context
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.config import DeploymentConfig
from ray.serve.schema import ReplicaRank

from deployments.contract import (
    Accepted,
    GenerationRequest,
    ModelDescription,
    TextDelta,
    TokenizedPrompt,
    TokenizeRequest,
)
from deployments.gpu.device import open_device
from deployments.text_generator import TextGenerator
from serve_app.config import AppConfig
from serve_app.ingress import build_app
from tests.deployments.tiny_folder import spec
from tests.serve_app.sse_decoder import events_of

FOLDER = Path(__file__).resolve().parents[3] / "models/pydoc-chat"
CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "depth": {"type": "integer", "minimum": 0, "maximum": 9},
        "kind": {"enum": ["module", "function"]},
    },
    "required": ["name", "depth", "kind"],
    "additionalProperties": False,
}
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "What does os.path.join do?"}],
    "tools": [
        {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "list_all"}},
    ],
    "max_tokens": 200,
}


class LocalGenerator(TextGenerator):
    """A replica whose batches have a queue of their own.

    Serve keeps one for each decorated method, on the loop that used it first: tests of another
    module, on another loop, would wait on it for ever.
    """

    _encode: Any = serve.batch(cast("Any", TextGenerator._encode).__wrapped__)


class LocalStream:
    """A replica's stream, without Ray between."""

    def __init__(self, events: AsyncIterator[list[Any]], num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self._events = events

    def __aiter__(self) -> AsyncIterator[list[TextDelta]]:
        return self._events

    async def aclose(self) -> None:
        await self._events.aclose()  # type: ignore[attr-defined] # a generator, as Ray has it


class LocalBackend:
    """A replica in this process."""

    def __init__(self, generator: TextGenerator) -> None:
        self._generator = generator

    async def generate(self, request: GenerationRequest) -> LocalStream:
        events = aiter(self._generator.generate(request))
        (accepted,) = await anext(events)
        assert isinstance(accepted, Accepted)
        return LocalStream(events, accepted.num_prompt_tokens)

    async def describe(self) -> ModelDescription:
        return await self._generator.describe()

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        return await self._generator.tokenize(request)

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        return await self._generator.detokenize(token_ids)

    async def ping(self) -> None:
        await self._generator.ping()


@pytest.fixture(scope="module")
def generator() -> Iterator[TextGenerator]:
    # Let the process pass for a replica: `@serve.batch` asks for its limits.
    context._set_internal_replica_context(
        replica_id=ReplicaID("tests", DeploymentID("m", "tests")),
        servable_object=object,
        _deployment_config=DeploymentConfig(max_ongoing_requests=512),
        rank=ReplicaRank(rank=0, node_rank=0, local_rank=0),
        world_size=1,
    )
    # A Ray of other tests may run, which has assigned nothing to this process.
    made = LocalGenerator(
        spec(FOLDER, id="m", max_model_len=1024),
        open_device=lambda spec: open_device(spec.device, has_gpu=False),
    )
    yield made
    made.__del__()
    context._INTERNAL_REPLICA_CONTEXT = None  # type: ignore[assignment] # as Ray starts


@pytest.fixture
async def client(generator: TextGenerator, config: AppConfig) -> AsyncIterator[httpx.AsyncClient]:
    app: Any = build_app(config, {"m": LocalBackend(generator)})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def test_its_template_takes_tools(generator: TextGenerator) -> None:
    description = await generator.describe()
    assert description.accepts_tools
    assert description.tool_call_format == "hermes"
    assert description.tool_call_token_ids == ()


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.5, "seed": 1}])
async def test_a_call_that_is_required_is_valid_by_the_schema(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    choice = {"type": "function", "function": {"name": "look_up"}}
    answer = await client.post(CHAT, json={**ASK, "tool_choice": choice, **fields})
    (told,) = answer.json()["choices"]
    assert told["finish_reason"] == "tool_calls"
    assert told["message"]["content"] is None
    (call,) = told["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)


async def test_one_of_the_functions_is_called_and_its_result_goes_back(
    client: httpx.AsyncClient,
) -> None:
    asked = {**ASK, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    counted = {key: ASK[key] for key in ("messages", "tools")}
    num_prompt_tokens = (await client.post("/tokenize", json=counted)).json()["count"]
    streamed = events_of((await client.post(CHAT, json={**asked, "stream": True})).content)
    whole = (await client.post(CHAT, json=asked)).json()
    assert whole["usage"]["prompt_tokens"] == num_prompt_tokens
    message = whole["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] in ("look_up", "list_all")
    deltas = [c["choices"][0]["delta"] for c in streamed[:-1]]
    pieces = [d["tool_calls"][0]["function"]["arguments"] for d in deltas if "tool_calls" in d]
    assert "".join(pieces) == call["function"]["arguments"]
    returned = {"role": "tool", "tool_call_id": call["id"], "content": "Join paths."}
    messages = [*ASK["messages"], message, returned]
    answer = await client.post(CHAT, json={**ASK, "messages": messages, "max_tokens": 4})
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] >= 1
