import gzip
import json

import pytest

from deployments.contract.errors import (
    ContextLengthExceededError,
    GenerationAbortedError,
    GenerationFailedError,
    InvalidImageError,
    InvalidRequestError,
    ModelNotFoundError,
    OverloadedError,
    RaystreamError,
    ReplicaUnavailableError,
)
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.offenders import for_each
from tests.serve_app.apps import Client, client_of
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
REFUSALS_1: list[tuple[RaystreamError, int, str, str]] = [
    (InvalidRequestError("no", "p"), 400, "invalid_request_error", "invalid_request"),
    (InvalidImageError("no", "p"), 400, "invalid_request_error", "invalid_image"),
    (
        ContextLengthExceededError("no", "p"),
        400,
        "invalid_request_error",
        "context_length_exceeded",
    ),
    (ModelNotFoundError("no", "p"), 404, "invalid_request_error", "model_not_found"),
    (GenerationFailedError("no", "p"), 500, "server_error", "generation_failed"),
    (OverloadedError("no", "p"), 503, "overloaded_error", "overloaded"),
    (RaystreamError("no", "p"), 500, "server_error", "internal_error"),
]


@for_each(
    *(
        (stream, error, status, type_, code)
        for stream in (False, True)
        for error, status, type_, code in REFUSALS_1
    )
)
async def test_each_refusal_has_its_status_type_and_code(
    stream: bool, error: RaystreamError, status: int, type_: str, code: str, client: Client
) -> None:
    client.backend.refusal = error
    answer = await client.ask(CHAT, {**HI, "stream": stream}, status)
    told = {"message": "p: no", "type": type_, "param": "p", "code": code}
    assert answer.json() == {"error": told}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)
    assert answer.headers.get("x-should-retry") == ("false" if status < 500 else None)


@pytest.mark.parametrize("lost", [ReplicaUnavailableError("gone"), GenerationAbortedError("gone")])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_model_without_a_replica_in_time_has_a_retry_after(
    client: Client, lost: RaystreamError, stream: bool
) -> None:
    client.backend.refusal = lost
    answer = await client.ask(CHAT, {**HI, "stream": stream}, 503)
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "replica_unavailable")
    assert "limits.failover_timeout_s" in error["message"]
    assert int(answer.headers["retry-after"]) > 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overload_has_a_retry_after(client: Client, stream: bool) -> None:
    client.backend.refusal = OverloadedError("no", None, 17)
    answer = await client.post(CHAT, json={**HI, "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "17")


NOT_JSON_1: list[tuple[bytes, str]] = [
    (b"", "The body is empty"),
    (b" \n", "The body is empty"),
    (b"{", "line 1, column 2"),
    (b"{'a': 1}", "not JSON"),
    (b'{"model": "\xff"}', "not text in UTF-8: byte 11 is 0xff"),
    (b'{"model": "\\ud800"}', "\\ud800, half of a surrogate pair"),
    (b'{"model": "ab\\uDFFFc"}', 'after \'{"model": "ab\'. Send both halves'),
    (b'{"temperature": NaN}', "NaN"),
    (b'{"metadata": {"deep": [-Infinity]}}', "-Infinity"),
    (
        b'{"temperature": 1e400}',
        "The number 1e400 is out of range: numbers are from -1.8e+308 to 1.8e+308.",
    ),
    (b'{"seed": ' + b"9" * 5000 + b"}", "more than 4300 digits"),
    (b"[" * 60000, "nested too deeply"),
    (b'{"seed": 1, "seed": 2}', "twice"),
    (b'{"metadata": {"a": 1, "a": 1}}', "twice"),
]


@for_each(*((path, body, hint) for path in (CHAT, "/text-generation") for body, hint in NOT_JSON_1))
async def test_a_body_that_is_not_json_is_refused_with_the_reason(
    path: str, body: bytes, hint: str, client: Client
) -> None:
    answer = await client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert hint in answer.json()["error"]["message"]


@for_each(b"[]", b"1", b'"text"', b"null")
async def test_a_body_that_is_not_an_object_is_refused(body: bytes, client: Client) -> None:
    answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_of_another_type_is_refused(client: Client) -> None:
    answer = await client.post(CHAT, data={"model": "m"})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


async def test_a_compressed_body_is_refused(client: Client) -> None:
    body = json.dumps(HI).encode()
    for encoding in ("gzip", "br, gzip"):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        answer = await client.post(CHAT, content=gzip.compress(body), headers=headers)
        assert answer.status_code == 415
        assert "Content-Encoding" in answer.json()["error"]["message"]
    headers["content-encoding"] = "identity"
    assert (await client.post(CHAT, content=body, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {**HI, "x" * 60000: 1},
        {**HI, "model": "x" * 60000},
        {**HI, "messages": [{"role": "user", "content": [{"type": "x" * 60000}]}]},
    ],
)
async def test_an_error_quotes_only_a_little_of_the_request(
    client: Client, body: dict[str, object]
) -> None:
    answer = await client.post(CHAT, json=body)
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 2000


async def test_an_unknown_route_is_a_404_in_json(client: Client) -> None:
    answer = await client.get("/v2/nothing")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


async def test_a_wrong_method_is_a_405_in_json_that_names_the_right_one(client: Client) -> None:
    answer = await client.get(CHAT)
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"
    assert answer.json()["error"]["code"] == "method_not_allowed"


async def test_a_bug_of_ours_reveals_no_internals(client: Client) -> None:
    client.backend.refusal = ZeroDivisionError("secret")
    answer = await client.ask(CHAT, HI, 500, {"x-request-id": "mine"})
    assert "secret" not in answer.text
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.headers.get_list("x-request-id") == ["mine"]


async def test_a_bug_of_ours_is_raised_again_for_the_log(client: Client) -> None:
    client.backend.refusal = ZeroDivisionError("secret")
    with pytest.raises(ZeroDivisionError):
        await client.post(CHAT, json=HI)


async def test_an_id_that_serve_echoes_is_not_repeated(
    config: AppConfig, backend: FakeBackend
) -> None:
    app = build_app(AppParts(config, {"m": backend}, serve_echoes_id=True))
    async with client_of(app) as client:
        answer = await client.get("/v1/models", headers={"x-request-id": "mine"})
    assert "x-request-id" not in answer.headers


@for_each(
    ([], "messages"),
    ([{"role": "king", "content": "hi"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    (
        [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "video"}]}],
        "messages[1].content[0].type",
    ),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": 1}}]}],
        "messages[0].content[0].image_url.url",
    ),
    ([{"role": "user", "content": "hi", "colour": "red"}], "messages[0].colour"),
    (
        [{"role": "user", "content": [{"type": "text", "text": "a", "colour": "red"}]}],
        "messages[0].content[0].colour",
    ),
    ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].image_url"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"colour": 1}}]}],
        "messages[0].content[0].image_url.colour",
    ),
    (
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": ""}, "colour": 1}],
            }
        ],
        "messages[0].content[0].colour",
    ),
)
async def test_the_error_names_the_path_of_the_field(
    messages: object, param: str, client: Client
) -> None:
    error = await client.refused(CHAT, {"model": "m", "messages": messages})
    assert error["param"] == param


@for_each(
    ({"type": "text", "colour": "red"}, "response_format.colour"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, "response_format.json_schema.schema"),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "colour": 1}},
        "response_format.json_schema.colour",
    ),
)
async def test_the_path_does_not_contain_names_of_union_members(
    format_: object, param: str, client: Client
) -> None:
    error = await client.refused(CHAT, {**HI, "response_format": format_})
    assert error["param"] == param


@pytest.mark.parametrize("number", ["2.0", "2e0", "20e-1"])
async def test_an_integer_may_be_written_with_a_fraction_or_an_exponent(
    client: Client, number: str
) -> None:
    body = f'{{"model": "m", "prompt": "a", "max_tokens": {number}, "temperature": {number}}}'
    headers = {"content-type": "application/json"}
    assert (await client.post("/v1/completions", content=body, headers=headers)).status_code == 200
    sampling = client.backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature) == (2, 2)
    assert isinstance(sampling.max_tokens, int)
