from typing import Any

import pytest
from pydantic import ValidationError

from deployments.contract.sampling_params import SamplingParams
from serve_app.api.chat.schema import ChatRequest
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import Client, client_of
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_fields_become_sampling_parameters(client: Client) -> None:
    fields = {
        "max_completion_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": -1,
        "stop": "END",
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": -1,
        "frequency_penalty": 0.5,
        "logit_bias": {"7": -100, "0": 2.5},
        "min_tokens": 4,
        "logprobs": True,
        "top_logprobs": 3,
    }
    assert (await client.post(CHAT, json={**HI, **fields})).status_code == 200
    assert client.backend.requests[0].sampling == SamplingParams(
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=2**63 - 1,
        stop=("END",),
        stop_token_ids=frozenset({1, 2}),
        ignore_eos=True,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-1,
        frequency_penalty=0.5,
        logit_bias=((7, -100), (0, 2.5)),
        min_tokens=4,
        top_logprobs=3,
    )


def test_stops_are_validated_up_to_the_first_error() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({**HI, "stop": [0] * 3})
    assert caught.value.error_count() == 1


async def test_absent_fields_have_the_model_s_defaults_except_the_seed(
    config: AppConfig, backend: FakeBackend
) -> None:
    defaults = SamplingParams(max_tokens=9, temperature=0.7, top_k=20, stop=("END",))
    backend = FakeBackend(default_sampling=defaults)
    async with client_of(build_app(AppParts(config, {"m": backend}))) as client:
        for _ in range(2):
            await client.post(CHAT, json={**HI, "temperature": None, "top_p": 0.5})
    first, second = (request.sampling for request in backend.requests)
    assert (first.max_tokens, first.temperature, first.top_k) == (9, 0.7, 20)
    assert (first.top_p, first.stop) == (0.5, ("END",))
    assert first.seed != second.seed


@pytest.mark.parametrize(
    ("fields", "top_logprobs"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_the_engine_returns_logprobs_only_on_request(
    fields: dict[str, Any], top_logprobs: int | None
) -> None:
    sampling = ChatRequest.model_validate({**HI, **fields}).to_sampling(SamplingParams())
    assert sampling.top_logprobs == top_logprobs


async def test_the_plain_surface_takes_the_same_parameters(client: Client) -> None:
    fields = {"presence_penalty": 1, "logit_bias": {"5": 1}, "min_tokens": 2, "seed": 0}
    assert (await client.post("/text-generation", json={"prompt": "a", **fields})).is_success
    assert client.backend.requests[0].sampling == SamplingParams(
        presence_penalty=1, logit_bias=((5, 1),), min_tokens=2
    )
