"""Attacks by requests that ask for too much."""

import json
from typing import Any

import pytest

from tests.serve_app.apps import CHAT, JSON, client_of, make_app, question
from tests.serve_app.fake_pooler import FakeClassifier
from tests.serve_app.fakes import FakeBackend

GENERATION = "/text-generation"
COMPLETIONS = "/v1/completions"
TOKENIZE = "/tokenize"
CLASSIFY, VLLM_CLASSIFY = "/v1/classify", "/classify"
# Overlapping pieces: of four characters xxx, then xxx again. More is read than was sent.
OVERLAPPING = {"max_chars": 3, "overlap": 2}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(tool_call_format="hermes")


@pytest.fixture
def classifier() -> FakeClassifier:
    return FakeClassifier()


def prompt(**fields: object) -> dict[str, object]:
    return {"prompt": "Hello?", "stream": False, **fields}


def conversation(num_messages: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x"}] * num_messages


def after_a_call(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def valid_by(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# Its name and its schema.
NUM_TOOL_BYTES = len("f") + len('{"type": "object"}')

# A row holds the path, a body that asks for too much, the limit it exceeds, and the field.
TOO_MUCH: list[tuple[str, dict[str, Any], dict[str, int], str]] = [
    (CHAT, question(n=3), {"max_num_choices": 2}, "n"),
    (COMPLETIONS, {"model": "m", "prompt": ["x"] * 3}, {"max_num_prompts": 2}, "prompt"),
    (COMPLETIONS, {"model": "m", "prompt": [[1]] * 3}, {"max_num_prompts": 2}, "prompt"),
    (COMPLETIONS, {"model": "m", "prompt": [1], "n": 3}, {"max_num_prompts": 2}, "prompt"),
    (COMPLETIONS, {"model": "m", "prompt": ["xx"] * 2}, {"max_prompt_bytes": 3}, "prompt"),
    (CHAT, question(tools=[tool("f"), tool("g")]), {"max_num_tools": 1}, "tools"),
    (CHAT, question(tools=[tool("f")]), {"max_tools_bytes": NUM_TOOL_BYTES - 1}, "tools[0]"),
    (
        TOKENIZE,
        {"messages": conversation(1), "tools": [tool("f"), tool("g")]},
        {"max_num_tools": 1},
        "tools",
    ),
    (
        CHAT,
        question(response_format=valid_by({"type": "object"})),
        {"max_schema_bytes": len('{"type": "object"}') - 1},
        "response_format",
    ),
    (
        CHAT,
        question(response_format=valid_by({"items": {"items": {}}})),
        {"max_schema_depth": 2},
        "response_format",
    ),
    (CHAT, question(stop=["a", "b", "c"]), {"max_num_stops": 2}, "stop"),
    (GENERATION, prompt(stop=["a", "b", "c"]), {"max_num_stops": 2}, "stop"),
    (CHAT, question(stop="\u00e9" * 6), {"max_stop_bytes": 11}, "stop"),
    (GENERATION, prompt(stop=["x" * 12]), {"max_stop_bytes": 11}, "stop"),
    (CHAT, question(messages=conversation(4)), {"max_num_messages": 3}, "messages"),
    (GENERATION, {"messages": conversation(4)}, {"max_num_messages": 3}, "messages"),
    (CHAT, question(messages=conversation(4)), {"max_prompt_bytes": 3}, "messages"),
    (GENERATION, prompt(prompt="\u65e5" * 4), {"max_prompt_bytes": 11}, "prompt"),
    (TOKENIZE, {"prompt": "\u65e5" * 4}, {"max_prompt_bytes": 11}, "prompt"),
    (TOKENIZE, {"messages": conversation(4)}, {"max_prompt_bytes": 3}, "messages"),
    (CHAT, question(messages=after_a_call('{"a": 1}')), {"max_prompt_bytes": 8}, "messages"),
    (CLASSIFY, {"input": ["x"] * 4}, {"max_num_texts": 3}, "input"),
    (VLLM_CLASSIFY, {"input": ["x"] * 4}, {"max_num_texts": 3}, "input"),
    (CLASSIFY, {"input": "\u65e5" * 4}, {"max_prompt_bytes": 11}, "input"),
    (VLLM_CLASSIFY, {"input": ["\u65e5"] * 4}, {"max_prompt_bytes": 11}, "input"),
    (CLASSIFY, {"input": ["xx"] * 2, "split": {"max_chars": 1}}, {"max_num_pieces": 3}, "split"),
    (CLASSIFY, {"input": "xxxx", "split": OVERLAPPING}, {"max_prompt_bytes": 5}, "input"),
]


async def test_cve_2026_34756_a_request_beyond_a_limit_is_refused_with_its_name(
    backend: FakeBackend, classifier: FakeClassifier
) -> None:
    wrong = []
    for path, body, limits, param in TOO_MUCH:
        async with client_of(make_app(backend, limits=limits, classifier=classifier)) as client:
            answer = await client.post(path, json=body)
        ((limit, most),) = limits.items()
        error = answer.json().get("error", {})
        names_it = f"limits.{limit}" in error.get("message", "") and str(most) in error["message"]
        if (answer.status_code, names_it, error.get("param")) != (400, True, param):
            wrong.append(f"{path}, {param}, {limits}: {answer.status_code} {answer.text[:200]}")
    assert wrong == []
    assert backend.num_calls == 0
    assert classifier.requests == []


async def test_cve_2026_34756_a_request_at_the_limit_is_served(
    backend: FakeBackend, classifier: FakeClassifier
) -> None:
    wrong = []
    for path, body, limits, param in TOO_MUCH:
        more = {limit: limits[limit] + 1 for limit in limits}
        async with client_of(make_app(backend, limits=more, classifier=classifier)) as client:
            answer = await client.post(path, json=body)
        if answer.status_code != 200:
            wrong.append(f"{path}, {param}, {more}: {answer.status_code} {answer.text[:200]}")
    assert wrong == []


UNBOUNDED: list[dict[str, Any]] = [
    {"n": 10**6},
    {"n": 17},
    {"stop": ["x"] * 10_000},
    {"logprobs": True, "top_logprobs": 10**6},
    {"logprobs": True, "top_logprobs": 21},
    {"tools": [tool(f"f{i}") for i in range(10_000)]},
    {"tools": [tool("x" * 129)]},
    {"response_format": valid_by({"enum": ["x" * 2**16]})},
    {"logit_bias": {str(i): 1 for i in range(5000)}},
    {"stop_token_ids": list(range(5000))},
]


@pytest.mark.slow
async def test_cve_2026_34756_nothing_is_unbounded_by_default(backend: FakeBackend) -> None:
    wrong = []
    async with client_of(make_app(backend)) as client:
        for fields in UNBOUNDED:
            answer = await client.post(CHAT, json=question(**fields))
            if answer.status_code != 400:
                wrong.append(f"{str(fields)[:80]}: {answer.status_code}")
    assert wrong == []
    assert backend.requests == []


async def test_cve_2026_34756_numbers_that_the_model_s_length_bounds_may_be_large(
    backend: FakeBackend,
) -> None:
    async with client_of(make_app(backend)) as client:
        for field in ("max_tokens", "top_k"):
            await client.ask(CHAT, question(**{field: 10**30}))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"input": ["a"] * 10_000},
        {"input": "a" * 2**21},
        {"input": "a" * 10_000, "split": {"max_chars": 1}},
        {"input": "a" * 2**20, "split": {"max_chars": 10**6, "overlap": 10**6 - 1}},
        {"input": "a", "top_k": 10**30, "split": {"max_chars": 10**30, "overlap": 10**29}},
    ],
    ids=["texts", "bytes", "pieces", "overlap", "numbers"],
)
async def test_cve_2026_34756_nothing_to_classify_is_unbounded_by_default(
    backend: FakeBackend, classifier: FakeClassifier, fields: dict[str, Any]
) -> None:
    async with client_of(make_app(backend, classifier=classifier)) as client:
        answer = await client.post(CLASSIFY, json=fields)
    if answer.status_code == 200:
        # These numbers are bounded by the text and by the model's labels.
        assert classifier.requests[0].texts == ("a",)
    else:
        assert answer.status_code == 400
        assert classifier.requests == []


async def test_cve_2026_54235_nan_and_infinity_are_refused(backend: FakeBackend) -> None:
    wrong = []
    async with client_of(make_app(backend)) as client:
        for field in ("temperature", "top_p", "presence_penalty", "seed", "max_tokens"):
            for number in ("NaN", "Infinity", "-Infinity", "1e999", "-1e999"):
                body = json.dumps(question())[:-1] + f', "{field}": {number}}}'
                answer = await client.post(CHAT, content=body, headers=JSON)
                hint = "out of range" if "1e" in number else "not a number"
                if answer.status_code != 400 or hint not in answer.text:
                    wrong.append(f"{field} {number}: {answer.status_code} {answer.text[:200]}")
    assert wrong == []
    assert backend.requests == []


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000, '{"a":' * 100_000, "\\ud800"])
async def test_a_body_made_to_exhaust_the_parser_is_a_400(backend: FakeBackend, text: str) -> None:
    body = text if text[0] != "\\" else f'{{"model": "{text}"}}'
    async with client_of(make_app(backend)) as client:
        answer = await client.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 400
    assert len(answer.text) < 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop_token_ids", "what"),
    [
        ([[]] * 2**17, "131072 objects, lists and fields"),
        ({str(i): 0 for i in range(2**17)}, "131072 objects, lists and fields"),
        ([0] * 2**22, "2097152 values"),
    ],
    ids=["lists", "fields", "numbers"],
)
async def test_a_body_that_would_block_the_event_loop_is_not_decoded(
    backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, stop_token_ids: object, what: str
) -> None:
    body = json.dumps(question(stop_token_ids=stop_token_ids))
    async with client_of(make_app(backend)) as client:
        monkeypatch.delattr("json.loads")
        answer = await client.post(CHAT, content=body, headers=JSON)
        monkeypatch.undo()
    assert answer.status_code == 400
    assert what in answer.json()["error"]["message"]
    assert backend.requests == []


@pytest.mark.parametrize(
    "text", ["[{:" * 2**16, '\\"[' * 2**16, '\n"{' * 2**16, "\\\\" * 2**16 + "["]
)
async def test_brackets_in_a_text_are_not_limited(backend: FakeBackend, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    async with client_of(make_app(backend)) as client:
        answer = await client.post(CHAT, json=question(messages=messages, user="[" * 2**17))
    assert answer.status_code == 200, answer.text


# A replica checks chat_template_kwargs: see tests/serve_app/api/chat/test_reasoning_model.py.
@pytest.mark.parametrize("field", ["chat_template", "mm_processor_kwargs", "documents"])
async def test_ghsa_69j4_grxj_j64p_a_request_can_not_bring_a_template(
    backend: FakeBackend, field: str
) -> None:
    value = {"chat_template": "{{ 7 * 7 }}"} if field != "chat_template" else "{{ 7 * 7 }}"
    async with client_of(make_app(backend)) as client:
        answer = await client.post(CHAT, json=question(**{field: value}))
    assert answer.status_code == 400
    assert backend.requests == []
