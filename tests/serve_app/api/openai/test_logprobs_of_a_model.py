"""Log-probabilities of prompts over HTTP, by OpenAI's client, compared with transformers."""

from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from fastapi import FastAPI
from transformers import AutoModelForCausalLM, AutoTokenizer

from deployments.generator_replica import GeneratorReplica
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.local_handle import local_backend
from tests.engines import EngineName, chat_model
from tests.serve_app.apps import Client
from tests.serve_app.local_replica import local_generator

FOLDER = Path(__file__).resolve().parents[4] / "models/pydoc-chat"
CONTEXT, CONTINUATION = "Join two or more", " pathname components"
TOLERANCE = 1e-3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def generator(
    tmp_path_factory: pytest.TempPathFactory, engine_name: EngineName
) -> Iterator[GeneratorReplica]:
    folder = chat_model(engine_name, tmp_path_factory.mktemp("chat"))
    with local_generator(folder, engine_name, max_model_len=256, dtype="float32") as made:
        yield made


@pytest.fixture
async def app(generator: GeneratorReplica) -> AsyncIterator[FastAPI]:
    config = AppConfig.model_validate({"models": [{"id": "m", "source": "nowhere"}]})
    async with aclosing(local_backend(generator)) as backend:
        yield build_app(AppParts(config, {"m": backend}))


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


def ids_of(text: str) -> list[int]:
    token_ids: list[int] = tokenizer()(text)["input_ids"]
    return token_ids


@cache
def logprobs_after(token_ids: tuple[int, ...]) -> torch.Tensor:
    """Return the stock model's log-probabilities after each token: [length, vocab]."""
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([token_ids])).logits[0]
    assert isinstance(logits, torch.Tensor)
    return logits.log_softmax(dim=-1)


def assert_positions(found: Any, token_ids: list[int], num_top: int) -> None:
    expected = logprobs_after(tuple(token_ids))
    assert isinstance(found, list)
    assert len(found) == len(token_ids)
    assert found[0] is None
    for position, row, own in zip(found[1:], expected, token_ids[1:], strict=False):
        assert position.keys() == {str(own), *map(str, row.topk(num_top).indices.tolist())}
        for token_id, told in position.items():
            assert told["logprob"] == pytest.approx(row[int(token_id)].item(), abs=TOLERANCE)
            assert told["rank"] == 1 + (row > row[int(token_id)]).sum().item()
            assert told["decoded_token"] == tokenizer().decode([int(token_id)])


async def test_completions_tell_what_transformers_computes(
    openai_client: openai.AsyncOpenAI,
) -> None:
    prompts = [CONTEXT + CONTINUATION, "import os"]
    answer = await openai_client.completions.create(
        model="m", prompt=prompts, n=2, max_tokens=3, extra_body={"prompt_logprobs": 2}
    )
    for at, choice in enumerate(answer.choices):
        assert_positions(choice.to_dict()["prompt_logprobs"], ids_of(prompts[at // 2]), 2)


async def test_chats_tell_what_transformers_computes(openai_client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What does os.path.join do?"}]
    answer = await openai_client.chat.completions.create(
        model="m", messages=messages, max_tokens=3, extra_body={"prompt_logprobs": 3}
    )
    prompt = tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    token_ids = tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(token_ids)
    assert_positions(answer.to_dict()["prompt_logprobs"], token_ids, 3)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_lm_evaluation_harness_can_score_continuations(
    client: Client, max_tokens: int
) -> None:
    # The body that its model `local-completions` sends, and what it reads of the answer.
    context, whole = ids_of(CONTEXT), ids_of(CONTEXT + CONTINUATION)
    prompts = [whole, whole[:-1], whole]
    body = {
        "model": "m",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": max_tokens,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    choices = (await client.post("/v1/completions", json=body)).json()["choices"]
    expected = logprobs_after(tuple(whole))
    for choice, prompt in zip(choices, prompts, strict=True):
        logprobs = choice["logprobs"]
        assert {len(entries) for entries in logprobs.values()} == {len(prompt) + max_tokens}
        end = len(prompt)
        own = [expected[i - 1][whole[i]].item() for i in range(len(context), end)]
        assert logprobs["token_logprobs"][len(context) : end] == pytest.approx(own, abs=TOLERANCE)
        likeliest = [expected[i - 1].max().item() for i in range(len(context), end)]
        found = [max(top.values()) for top in logprobs["top_logprobs"][len(context) : end]]
        assert found == pytest.approx(likeliest, abs=TOLERANCE)
        # The text does not hold the token that may have ended it.
        assert "".join(logprobs["tokens"]).startswith(choice["text"])
        assert logprobs["text_offset"][len(context)] == len(CONTEXT)
