"""`openai` for Python: each refusal raises the SDK's own exception and says what is wrong.

The client does not retry a request that would be refused again.
"""

from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from deployments.contract.errors import GenerationFailedError
from deployments.contract.output import TextDelta
from tests.clients.questions import MODEL, NAME, NARROW, about
from tests.serve_app.apps import make_app
from tests.serve_app.fakes import FakeBackend, Step
from tests.serve_app.local_server import LocalServer


@pytest.fixture
def requests() -> list[httpx2.Request]:
    """Return a list for the requests that the client sends."""
    return []


@pytest.fixture
def eager(local: LocalServer, requests: list[httpx2.Request]) -> Iterator[openai.OpenAI]:
    """Yield a client that retries."""
    http = local.client(event_hooks={"request": [requests.append]})
    with openai.OpenAI(
        base_url=f"{local.url}/v1", api_key="none", max_retries=2, http_client=http
    ) as client:
        yield client


REFUSALS: list[tuple[dict[str, Any], type[openai.APIStatusError], int, str, str | None]] = [
    (about(NAME, model="nobody"), openai.NotFoundError, 404, "model_not_found", "model"),
    (about(NAME, temperature=9), openai.BadRequestError, 400, "invalid_request", "temperature"),
    (about(NAME, max_tokens=0), openai.BadRequestError, 400, "invalid_request", "max_tokens"),
    (
        about(NAME, extra_body={"temperatur": 1}),
        openai.BadRequestError,
        400,
        "unknown_parameter",
        "temperatur",
    ),
    (
        about(NAME, audio={"format": "wav", "voice": "ash"}),
        openai.BadRequestError,
        400,
        "unsupported_parameter",
        "audio",
    ),
    (about("x " * 4000), openai.BadRequestError, 400, "context_length_exceeded", "messages"),
    (
        about(NAME, extra_headers={"Content-Type": "text/plain"}),
        openai.APIStatusError,
        415,
        "unsupported_media_type",
        None,
    ),
    (about("x" * 2**26), openai.APIStatusError, 413, "request_too_large", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "raised", "status", "code", "param"), REFUSALS, ids=[row[3] for row in REFUSALS]
)
def test_a_refusal_raises_and_is_not_retried(
    eager: openai.OpenAI,
    requests: list[httpx2.Request],
    asked: dict[str, Any],
    raised: type[openai.APIStatusError],
    status: int,
    code: str,
    param: str | None,
    stream: bool,
) -> None:
    with pytest.raises(raised) as caught:
        eager.chat.completions.create(**asked, stream=stream)
    error = caught.value
    assert type(error) is raised
    assert (error.status_code, error.code, error.param) == (status, code, param)
    assert error.type == "invalid_request_error"
    assert error.request_id
    assert len(requests) == 1


def test_a_prompt_that_is_too_long_is_refused_in_openai_s_words(client: openai.OpenAI) -> None:
    told = (
        r"This model's maximum context length is 2048 tokens\. However, your messages resulted in"
    )
    with pytest.raises(openai.BadRequestError, match=told):
        client.chat.completions.create(**about("x " * 4000))


def test_an_unknown_model_s_error_names_the_served_models(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=f"{MODEL}.*{NARROW}"):
        client.models.retrieve("nobody")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/chat/completions", 405), ("POST", "/nothing", 404), ("DELETE", "/models", 405)],
)
def test_an_unknown_path_or_method_raises(
    client: openai.OpenAI, method: str, path: str, status: int
) -> None:
    options = openai._models.FinalRequestOptions(method=method, url=path)
    with pytest.raises(openai.APIStatusError) as caught:
        client.request(object, options)
    assert caught.value.status_code == status
    assert caught.value.code == {404: "not_found", 405: "method_not_allowed"}[status]


async def test_a_broken_stream_raises_and_never_looks_complete() -> None:
    steps: list[Step] = [[TextDelta((1,), "a")], GenerationFailedError("broken")]
    transport = httpx2.ASGITransport(make_app(FakeBackend(steps)))
    async with httpx2.AsyncClient(transport=transport) as http:
        client = openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
        )
        stream = await client.chat.completions.create(**about(NAME, model="m"), stream=True)
        chunks: list[Any] = []
        with pytest.raises(openai.APIError) as caught:
            chunks.extend([chunk async for chunk in stream])
    assert caught.value.code == "generation_failed"
    assert [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason] == []
