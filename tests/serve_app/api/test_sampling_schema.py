from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from deployments.contract import SamplingParams
from serve_app.api.chat_schema import ChatRequest
from serve_app.config import AppConfig
from serve_app.ingress import build_app
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_fields_become_sampling_parameters(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    fields = {
        "max_completion_tokens": 5,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": -1,
        "stop": "END",
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
    }
    assert (await client.post(CHAT, json={**HI, **fields})).status_code == 200
    assert backend.requests[0].sampling == SamplingParams(
        max_tokens=5,
        temperature=0,
        top_p=0.5,
        top_k=3,
        seed=2**63 - 1,
        stop=("END",),
        stop_token_ids=frozenset({1, 2}),
        ignore_eos=True,
    )


def test_stops_are_read_up_to_the_first_mistake() -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({**HI, "stop": [0] * 3})
    assert caught.value.error_count() == 1


async def test_what_is_not_given_is_the_model_s_default_but_for_the_seed(
    config: AppConfig, backend: FakeBackend
) -> None:
    defaults = SamplingParams(max_tokens=9, temperature=0.7, top_k=20, stop=("END",))
    backend = FakeBackend(default_sampling=defaults)
    transport = httpx.ASGITransport(build_app(config, {"m": backend}))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for _ in range(2):
            await client.post(CHAT, json={**HI, "temperature": None, "top_p": 0.5})
    first, second = (request.sampling for request in backend.requests)
    assert (first.max_tokens, first.temperature, first.top_k) == (9, 0.7, 20)
    assert (first.top_p, first.stop) == (0.5, ("END",))
    assert first.seed != second.seed
