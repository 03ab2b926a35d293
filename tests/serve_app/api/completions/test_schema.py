from typing import Any

import pytest
from pydantic import ValidationError

from serve_app.api.completions.schema import CompletionRequest
from serve_app.api.openai.prompt_schema import MAX_NUM_TOKEN_IDS
from tests.offenders import for_each
from tests.serve_app.apps import Client

PATH = "/v1/completions"
HI: dict[str, Any] = {"model": "m", "prompt": "hi"}


@for_each(
    ("prompt", None, "prompt"),
    ("prompt", "", "prompt"),
    ("prompt", [], "prompt"),
    ("prompt", 5, "prompt"),
    ("prompt", {}, "prompt"),
    ("prompt", [""], "prompt[0]"),
    ("prompt", ["a", 1], "prompt[1]"),
    ("prompt", [1, "a"], "prompt[1]"),
    ("prompt", [1, True], "prompt[1]"),
    ("prompt", [-1], "prompt[0]"),
    ("prompt", [2**31], "prompt[0]"),
    ("prompt", [[]], "prompt[0]"),
    ("prompt", [[1], "a"], "prompt[1]"),
    ("prompt", [[1], [2.5]], "prompt[1][0]"),
    ("echo", 1, "echo"),
    ("n", 17, "n"),
    ("logprobs", -1, "logprobs"),
    ("logprobs", 21, "logprobs"),
    ("logprobs", True, "logprobs"),
    ("best_of", 0, "best_of"),
    ("best_of", 2, "best_of"),
    ("suffix", "end", "suffix"),
    ("max_tokens", -1, "max_tokens"),
    ("prompt_logprobs", -1, "prompt_logprobs"),
    ("prompt_logprobs", 21, "prompt_logprobs"),
    ("prompt_logprobs", True, "prompt_logprobs"),
    ("stream_options", {"include_usage": True}, "stream_options"),
)
async def test_a_value_out_of_bounds_is_refused_by_name(
    field: str, value: Any, param: str, client: Client
) -> None:
    error = await client.refused(PATH, {**HI, field: value})
    assert error["param"] == param
    assert not client.backend.requests


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}])
async def test_stream_options_that_ask_for_nothing_need_no_stream(
    client: Client, options: dict[str, Any]
) -> None:
    assert (await client.post(PATH, json={**HI, "stream_options": options})).status_code == 200


@pytest.mark.parametrize("num", [0, 2])
async def test_log_probabilities_of_the_prompt_are_not_streamed_in_vllm_s_shape(
    client: Client, num: int
) -> None:
    error = await client.refused(PATH, {**HI, "stream": True, "prompt_logprobs": num})
    assert error["param"] == "stream"
    assert "prompt_logprobs" in error["message"]
    assert not client.backend.requests


async def test_values_that_ask_for_nothing_are_accepted(client: Client) -> None:
    harmless = {"suffix": "", "best_of": 1, "n": 1, "echo": False, "logprobs": None, "user": "me"}
    assert (await client.post(PATH, json={**HI, **harmless})).status_code == 200


@pytest.mark.parametrize("prompt", [[""] * 100, [-1] * 100, [[]] * 100])
def test_prompts_are_validated_up_to_the_first_error(prompt: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({**HI, "prompt": prompt})
    assert caught.value.error_count() == 1


def test_too_many_token_ids_are_refused_without_validation() -> None:
    with pytest.raises(ValidationError, match="at most"):
        CompletionRequest.model_validate({**HI, "prompt": [1] * (MAX_NUM_TOKEN_IDS + 1)})
