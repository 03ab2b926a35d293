"""The surfaces other than chat, over real HTTP on Ray; the fast tests use fakes."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from ray import serve

from deployments.text_generator import TextGenerator
from serve_app.config import AppConfig, ModelConfig
from serve_app.ingress import Ingress
from tests.deployments.tiny_folder import spec

MODEL = "org/Tiny-0.1B"


@pytest.fixture(scope="module")
def url(base_url: str, tiny_folder: Path) -> Iterator[str]:
    config = AppConfig(models=(ModelConfig(id=MODEL, source="tiny"),))
    options = {"num_cpus": 0.5}
    tiny = serve.deployment(name=config.models[0].deployment_name, ray_actor_options=options)(
        TextGenerator
    ).bind(spec(tiny_folder, id=MODEL))
    ingress = serve.deployment(name="Ingress", ray_actor_options=options)(Ingress)
    serve.run(ingress.bind(config, {MODEL: tiny}), name="surface", route_prefix="/surface")
    yield f"{base_url}/surface"
    serve.delete("surface")


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_s_client_completes_several_prompts_streamed_and_unstreamed(
    client: openai.OpenAI,
) -> None:
    prompts = ["one", "another", "a third"]
    whole = client.completions.create(
        model=MODEL, prompt=prompts, n=2, seed=7, temperature=1.2, logprobs=2, max_tokens=20
    )
    stream = client.completions.create(
        model=MODEL,
        prompt=prompts,
        n=2,
        seed=7,
        temperature=1.2,
        logprobs=2,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts, tokens = [""] * 6, [list[str]() for _ in range(6)]
    chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None:
                tokens[choice.index] += choice.logprobs.tokens or []
    assert [choice.text for choice in whole.choices] == texts
    told = [choice.logprobs.tokens for choice in whole.choices if choice.logprobs is not None]
    assert told == tokens
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.completion_tokens == sum(map(len, tokens))
    alone = client.completions.create(
        model=MODEL, prompt=prompts[1], seed=7, temperature=1.2, max_tokens=20
    )
    assert alone.choices[0].text == texts[2]


def test_a_repeated_prompt_is_reported_as_cached(client: openai.OpenAI) -> None:
    prompt = "a prompt that nobody else sends, and long enough to be kept"
    usages = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=2).usage for _ in range(2)
    ]
    details = [usage.prompt_tokens_details for usage in usages if usage is not None]
    assert [each.cached_tokens for each in details if each] == [0, len(prompt) - 1]


def test_tokenizing_and_detokenizing_returns_the_text(url: str, client: openai.OpenAI) -> None:
    told = httpx.post(f"{url}/tokenize", json={"prompt": "Good day", "return_token_strs": True})
    body = told.json()
    assert (body["count"], body["max_model_len"]) == (8, 128)
    assert body["token_strs"][4] == "Ġ"
    back = httpx.post(f"{url}/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "Good day"}
    answers = [
        client.completions.create(model=MODEL, prompt=prompt, temperature=0, echo=True)
        for prompt in ("Good day", body["tokens"], [body["tokens"]])
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert answers[0].choices[0].text.startswith("Good day")
    assert {answer.usage.prompt_tokens for answer in answers if answer.usage} == {8}


@pytest.mark.parametrize("path", [f"/v1/models/{MODEL}", f"/v1/models/{MODEL.replace('/', '%2F')}"])
def test_a_model_with_a_slash_is_shown(url: str, path: str) -> None:
    assert httpx.get(url + path).json()["id"] == MODEL


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=MODEL):
        client.models.retrieve("org/other")
    assert [model.id for model in client.models.list()] == [MODEL]


def test_tokens_unknown_to_the_model_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="token ids must be from 0 to") as caught:
        client.completions.create(model=MODEL, prompt=[5, 2**31 - 1])
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/docs", "/nothing"])
def test_head_is_answered_like_get_without_the_body(url: str, path: str) -> None:
    got, head = httpx.get(url + path, timeout=30), httpx.head(url + path, timeout=30)
    assert head.status_code == got.status_code
    assert head.headers["content-type"] == got.headers["content-type"]
    assert not head.content


def test_an_operator_sees_the_replica_and_its_plot(url: str) -> None:
    (model,) = httpx.get(f"{url}/v1/devices", timeout=30).json()["data"]
    (replica,) = model["replicas"]
    assert (model["id"], model["num_replicas"]) == (MODEL, {"RUNNING": 1})
    assert replica["memory"]["use"]["process_bytes"] > 0
    assert replica["memory"]["history"]["unix_s"]
    plot = httpx.get(f"{url}/v1/devices/history.png", timeout=60)
    assert (plot.status_code, plot.content[:4]) == (200, b"\x89PNG")


def test_the_docs_are_complete(url: str) -> None:
    assert "docs/swagger-ui-bundle.js" in httpx.get(f"{url}/docs").text
    script = httpx.get(f"{url}/docs/swagger-ui-bundle.js")
    assert script.headers["content-type"].partition(";")[0] == "text/javascript"
    assert len(script.content) > 1_000_000
