"""Conversations by `previous_response_id` with a real model: what is cached of each turn's prompt.

The model has windows, and the answers have a grammar: their text is divided into other tokens when
it comes back.
"""

from contextlib import AsyncExitStack, aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.deployments.local_handle import local_backend
from tests.faults import test_lost_at_each_token
from tests.faults.served.kinds import ROWS
from tests.serve_app.api.batches.test_routes import running
from tests.serve_app.local_replica import local_generator

pytestmark = pytest.mark.slow

NUM_TURNS = 3
TOOL = {"type": "function", "name": "store", "parameters": ROWS}
KINDS: dict[str, dict[str, Any]] = {
    "schema": {"text": {"format": {"type": "json_schema", "name": "rows", "schema": ROWS}}},
    "tool": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
}


async def conversation(
    folder: Path, fields: dict[str, Any], *, prefix_caching: bool
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the texts, or the arguments, and the usage of each turn."""
    texts, usages = [], []
    config = AppConfig.model_validate(
        {"models": [{"id": "m", "source": "nowhere"}], "jobs": {"folder": str(folder)}}
    )
    model = test_lost_at_each_token.FOLDER
    async with AsyncExitStack() as stack:
        generator = stack.enter_context(
            local_generator(
                model, max_model_len=2048, max_num_seqs=2, prefix_caching=prefix_caching
            )
        )
        backend = await stack.enter_async_context(aclosing(local_backend(generator)))
        client = await stack.enter_async_context(
            running(build_app(AppParts(config, {"m": backend})))
        )
        asked: dict[str, Any] = {"temperature": 0, "max_output_tokens": 600, **fields}
        asked["input"] = "Which functions of os, json and re return numbers? List them."
        for _ in range(NUM_TURNS):
            told = (await client.ask("/v1/responses", asked)).json()
            assert told["status"] == "completed", told
            (item,) = told["output"]
            usages.append(told["usage"])
            asked["previous_response_id"] = told["id"]
            if item["type"] == "function_call":
                texts.append(item["arguments"])
                result = {"type": "function_call_output", "call_id": item["call_id"]}
                asked["input"] = [{**result, "output": "Stored. Go on."}]
            else:
                texts.append(item["content"][0]["text"])
                asked["input"] = "List others."
    return texts, usages


@pytest.mark.parametrize("kind", KINDS)
async def test_the_history_of_a_followed_response_is_in_the_cache_up_to_its_answer(
    tmp_path: Path, kind: str
) -> None:
    texts, usages = await conversation(tmp_path / "cached", KINDS[kind], prefix_caching=True)
    for before, after in pairwise(usages):
        assert after["input_tokens_details"]["cached_tokens"] >= before["input_tokens"] - 1
    others, unshared = await conversation(tmp_path / "other", KINDS[kind], prefix_caching=False)
    assert texts == others
    assert [usage["input_tokens_details"]["cached_tokens"] for usage in unshared] == [0] * NUM_TURNS
