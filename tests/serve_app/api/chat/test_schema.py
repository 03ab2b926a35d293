from typing import Any

from tests.offenders import for_each
from tests.serve_app.apps import Client

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@for_each(
    ("max_tokens", 0),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("max_completion_tokens", 0),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_k", -2),
    ("seed", 2**63),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop_token_ids", [1] * 129),
    ("stream", "yes"),
    ("stream_options", {"include_usage": True}),
    ("model", 5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 101),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", "much"),
    ("min_tokens", -1),
    ("min_tokens", 0.5),
    ("logit_bias", [1]),
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"1.0": 1}),
    ("logit_bias", {"01": 1}),
    ("logit_bias", {"²": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("n", 0),
    ("n", 17),
    ("n", True),
    ("logprobs", 1),
    ("top_logprobs", 5),
)
async def test_a_value_out_of_bounds_is_refused_by_name(
    field: str, value: Any, client: Client
) -> None:
    error = await client.refused(CHAT, {**HI, field: value})
    assert error["param"] == field


@for_each(-1, 21)
async def test_top_logprobs_is_bounded(num: int, client: Client) -> None:
    error = await client.refused(CHAT, {**HI, "logprobs": True, "top_logprobs": num})
    assert error["param"] == "top_logprobs"


async def test_an_error_within_a_mapping_names_the_key(client: Client) -> None:
    error = await client.refused(CHAT, {**HI, "logit_bias": {"7": "much"}})
    assert error["param"] == "logit_bias.7"


async def test_two_limits_that_differ_are_refused(client: Client) -> None:
    both = {"max_tokens": 1, "max_completion_tokens": 2}
    assert (await client.post(CHAT, json={**HI, **both})).status_code == 400


@for_each(
    ("audio", {"voice": "alloy"}),
    ("best_of", 2),
    ("chat_template", "{{ 1 }}"),
    ("echo", True),
    ("function_call", "auto"),
    ("functions", [{"name": "f"}]),
    ("modalities", ["audio"]),
    ("prediction", {"type": "content"}),
    ("service_tier", "flex"),
    ("skip_special_tokens", False),
    ("store", True),
    ("verbosity", "low"),
    ("web_search_options", {}),
)
async def test_a_field_that_is_not_honoured_is_refused_by_name(
    field: str, value: Any, client: Client
) -> None:
    error = await client.refused(CHAT, {**HI, field: value})
    assert error["param"] == field
    assert error["code"] == "unsupported_parameter"
    assert field in error["message"]
    assert not client.backend.requests


async def test_values_that_ask_for_nothing_are_accepted(client: Client) -> None:
    harmless: dict[str, Any] = {
        "frequency_penalty": 0.0,
        "length_penalty": 1.0,
        "logit_bias": None,
        "logprobs": False,
        "metadata": {"a": "b"},
        "n": 1,
        "parallel_tool_calls": True,
        "presence_penalty": 0,
        "response_format": {"type": "text"},
        "service_tier": "auto",
        "store": False,
        "tools": [],
        "top_logprobs": None,
        "user": "me",
    }
    assert (await client.post(CHAT, json={**HI, **harmless})).status_code == 200


@for_each(("temprature", "temperature"), ("logprob", "logprobs"), ("zzzz", None))
async def test_an_unknown_field_is_refused_with_a_suggestion(
    field: str, hint: str | None, client: Client
) -> None:
    error = (await client.post(CHAT, json={**HI, field: 1})).json()["error"]
    assert (error["param"], error["code"]) == (field, "unknown_parameter")
    assert ("Did you mean" in error["message"]) == (hint is not None)
    assert hint is None or repr(hint) in error["message"]
