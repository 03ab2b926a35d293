"""A real replica of a tiny random model whose template and tokenizer know reasoning.

Biases make the model choose the marks. So each test says where the reasoning ends.
"""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from deployments.generator_replica import GeneratorReplica
from serve_app.config import AppConfig
from tests.deployments.tiny_folder import REASONING_TEMPLATE, save_text_model
from tests.engine.tiny_models import SHAPE, byte_tokenizer
from tests.engines import EngineName
from tests.offenders import every
from tests.serve_app.apps import AppClient
from tests.serve_app.local_replica import local_client, local_generator
from tests.serve_app.sse_decoder import events_of

CHAT = "/v1/chat/completions"
START, END = 300, 301
NO_SPECIAL = {str(i): -100 for i in range(44)}
ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "Why <think>?"}],
    "seed": 3,
    "max_tokens": 24,
    "logit_bias": {**NO_SPECIAL, str(END): 3.5},
}
SCHEMA = {"enum": ["red", "green", "blue"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "color", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def generator(
    tmp_path_factory: pytest.TempPathFactory, engine_name: EngineName
) -> Iterator[GeneratorReplica]:
    folder = tmp_path_factory.mktemp("qwen3")
    config = {**SHAPE, "vocab_size": 302, "num_key_value_heads": 2, "head_dim": 32}
    torch.manual_seed(0)
    save_text_model(folder, Qwen3ForCausalLM(Qwen3Config(**config)))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    tokenizer.chat_template = REASONING_TEMPLATE + (
        "{% if begin is defined and begin %}<think>\n{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    with local_generator(folder, engine_name, max_model_len=256) as made:
        yield made


@pytest.fixture
async def client(generator: GeneratorReplica, config: AppConfig) -> AsyncIterator[AppClient]:
    async with local_client(generator, config) as client:
        yield client


async def whole(client: AppClient, **fields: Any) -> Any:
    return (await client.ask(CHAT, {**ASK, **fields})).json()


async def test_the_replica_finds_its_marks_and_the_template_s_parameters(
    generator: GeneratorReplica,
) -> None:
    description = await generator.describe()
    assert description.reasoning is not None
    tokens = description.reasoning.tokens
    assert (tokens.start, tokens.end) == (START, END)
    assert description.template_parameters == ("begin", "enable_thinking")


@pytest.mark.parametrize("begin", [True, False])
async def test_reasoning_is_separated_streamed_or_whole(client: AppClient, begin: bool) -> None:
    bias = {**ASK["logit_bias"], **({} if begin else {str(START): 10})}
    fields = {"chat_template_kwargs": {"begin": begin}, "logit_bias": bias}
    num_reasoned = 0
    for seed in range(6):
        told = await whole(client, **fields, seed=seed)
        message, usage = told["choices"][0]["message"], told["usage"]
        body = {**ASK, **fields, "seed": seed, "stream": True}
        *chunks, _ = events_of((await client.post(CHAT, json=body)).content)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        for field in ("reasoning_content", "content"):
            joined = "".join(delta.get(field) or "" for delta in deltas)
            assert joined == (message.get(field) or "")
        num_reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        assert num_reasoning <= usage["completion_tokens"]
        assert bool(message.get("reasoning_content")) <= bool(num_reasoning)
        num_reasoned += bool(message.get("reasoning_content"))
    assert num_reasoned


async def test_with_reasoning_off_all_of_the_answer_is_content(client: AppClient) -> None:
    told = await whole(client, chat_template_kwargs={"enable_thinking": False})
    assert "reasoning_content" not in told["choices"][0]["message"]
    assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    messages = ASK["messages"]
    counts = [
        (await client.post("/tokenize", json={"messages": messages, **fields})).json()["count"]
        for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
    ]
    # <think>, </think> and the four line breaks
    assert counts[1] - counts[0] == 6
    assert told["usage"]["prompt_tokens"] == counts[1]


@pytest.mark.parametrize(
    ("kwargs", "reasons"),
    [({"begin": True}, True), ({}, None), ({"enable_thinking": False}, False)],
)
async def test_the_content_is_valid_by_the_schema_after_any_reasoning(
    client: AppClient, kwargs: dict[str, Any], reasons: bool | None
) -> None:
    bias = {**ASK["logit_bias"], str(START): 2, str(END): 6}
    for seed in range(6):
        told = await whole(
            client,
            seed=seed,
            logit_bias=bias,
            response_format=FORMAT,
            chat_template_kwargs=kwargs,
            max_tokens=200,
        )
        (choice,) = told["choices"]
        num_reasoning = told["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert reasons is None or bool(num_reasoning) == reasons
        if choice["finish_reason"] == "stop":
            assert json.loads(choice["message"]["content"]) in SCHEMA["enum"]
        else:
            assert (choice["message"]["content"], num_reasoning) == (None, 200)


@pytest.mark.parametrize("route", ["/tokenize", "/text-generation"])
async def test_a_plain_prompt_has_no_template_to_set(client: AppClient, route: str) -> None:
    body = {"prompt": "hi", "chat_template_kwargs": {"begin": True}}
    error = await client.refused(route, body)
    assert error["param"] == "chat_template_kwargs"
    body = {"prompt": "hi", "chat_template_kwargs": {}}
    assert (await client.post(route, json=body)).status_code == 200


async def test_ghsa_69j4_grxj_j64p_what_the_template_does_not_read_is_refused_and_nothing_runs(
    client: AppClient, generator: GeneratorReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whatever is rendered or generated is a 500 now.
    monkeypatch.delattr(type(generator._engine), "running")
    monkeypatch.delattr(PreTrainedTokenizerBase, "apply_chat_template")
    for case in every(
        (route, name)
        for route in (CHAT, "/tokenize", "/text-generation")
        for name in ("chat_template", "tokenize", "tools", "other")
    ):
        with case as (route, name):
            value = "{{ 7 * 7 }}" if name == "chat_template" else True
            body = {
                "model": "m",
                "messages": ASK["messages"],
                "chat_template_kwargs": {name: value},
            }
            error = await client.refused(route, body)
            assert error["param"] == f"chat_template_kwargs.{name}"
            assert "A request may set: begin, enable_thinking." in error["message"]
