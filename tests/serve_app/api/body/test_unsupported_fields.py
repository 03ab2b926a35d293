"""Walks over openai's own types, so that a field which OpenAI adds is noticed here."""

from typing import Any, get_type_hints

import httpx
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.chat.chat_completion_assistant_message_param import (
    ChatCompletionAssistantMessageParam,
)
from openai.types.chat.chat_completion_developer_message_param import (
    ChatCompletionDeveloperMessageParam,
)
from openai.types.chat.chat_completion_stream_options_param import (
    ChatCompletionStreamOptionsParam,
)
from openai.types.chat.chat_completion_system_message_param import (
    ChatCompletionSystemMessageParam,
)
from openai.types.chat.chat_completion_tool_message_param import ChatCompletionToolMessageParam
from openai.types.chat.chat_completion_user_message_param import ChatCompletionUserMessageParam
from openai.types.shared_params import FunctionDefinition

from serve_app.api.answer_schema import StreamOptions
from serve_app.api.chat_schema import ChatRequest
from serve_app.api.completions_schema import CompletionRequest
from serve_app.api.message_schema import MessageBody
from serve_app.api.refusals import REASONS
from serve_app.api.strict_body import StrictBody
from serve_app.api.tool_schema import FunctionBody

SURFACES: dict[str, tuple[type[StrictBody], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "hi"}]}),
    "/v1/completions": (CompletionRequest, {"prompt": "hi"}),
}
TYPES: list[tuple[type[StrictBody], type[Any]]] = [
    (ChatRequest, chat_params.CompletionCreateParamsStreaming),
    (ChatRequest, chat_params.CompletionCreateParamsNonStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
    (CompletionRequest, completion_create_params.CompletionCreateParamsNonStreaming),
    (StreamOptions, ChatCompletionStreamOptionsParam),
    (MessageBody, ChatCompletionAssistantMessageParam),
    (MessageBody, ChatCompletionDeveloperMessageParam),
    (MessageBody, ChatCompletionSystemMessageParam),
    (MessageBody, ChatCompletionToolMessageParam),
    (MessageBody, ChatCompletionUserMessageParam),
    (FunctionBody, FunctionDefinition),
]
FIELDS = sorted(
    {(ours, name) for ours, theirs in TYPES for name in get_type_hints(theirs)},
    key=lambda pair: (pair[0].__name__, pair[1]),
)
REFUSED = [
    (path, name) for path, (body, _) in SURFACES.items() for name in sorted(body.unsupported)
]


@pytest.mark.parametrize(("body", "field"), FIELDS)
def test_every_field_of_openai_s_is_honoured_or_refused_with_a_reason(
    body: type[StrictBody], field: str
) -> None:
    if field in body.model_fields:
        assert field not in body.unsupported
    else:
        assert field in body.unsupported
        assert REASONS[field]


@pytest.mark.parametrize(("path", "field"), REFUSED)
async def test_what_is_refused_is_refused_by_its_name_and_nothing_of_it_passes(
    client: httpx.AsyncClient, path: str, field: str
) -> None:
    body = {"model": "m", **SURFACES[path][1]}
    answer = await client.post(path, json={**body, field: {"ask": "for something"}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert error["code"] == "unsupported_parameter"
    harmless = SURFACES[path][0].unsupported[field]
    for value in (None, *harmless):
        assert (await client.post(path, json={**body, field: value})).status_code == 200
