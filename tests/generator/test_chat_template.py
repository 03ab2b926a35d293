"""Templates as the families have them, cut down to what tools touch."""

import pytest
from transformers import PreTrainedTokenizerBase

from deployments.chat_template import ChatTemplate, choose_tool_call_format, special_marks
from deployments.contract import ChatMessage, TextPart, Tool, ToolCall
from deployments.errors import InvalidRequestError
from deployments.tool_call_format import HERMES, MISTRAL
from tests.deployments import tiny_folder
from tests.engine.tiny_models import byte_tokenizer

QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # noqa: E501 - as the family writes it
LLAMA = """
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (message.content | tojson) + '<|eot_id|>' }}
    {%- elif message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {%- if tools is not none and loop.first %}
            {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {%- endif %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501 - as the family writes it
MISTRAL_V3 = """
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is not none and loop.last %}
            {{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {%- if tool_call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + tool_call.id + '"}' + (']</s>' if loop.last else ', ') }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + message.content | trim + '</s>' }}
    {%- endif %}
{%- endfor %}
"""  # noqa: E501 - as the family writes it
XML = QWEN.replace('{"name": "', "<function=").replace('", "arguments": ', ">")
STUMBLING = QWEN.replace(
    "{{- tool | tojson }}", "{{- tool.function.name + ' takes ' + tool.function.parameters.type }}"
)

TOOL = Tool("get", "Gets.", '{"type": "object"}')
ASKED = ChatMessage("user", (TextPart("Weather?"),))
CALL = ToolCall("abcdefgh1", "get", '{"city": "Köln", "days": [1, 2]}')
CALLED = ChatMessage("assistant", (), (CALL,))
RETURNED = ChatMessage("tool", (TextPart("rain"),), (), "abcdefgh1", "get")


def tokenizer_with(template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def template_of(text: str | None) -> ChatTemplate:
    return ChatTemplate(tokenizer_with(text), None)


@pytest.mark.parametrize(
    ("text", "accepts_tools", "name"),
    [
        (QWEN, True, "hermes"),
        (LLAMA, True, "llama3_json"),
        (MISTRAL_V3, True, "mistral"),
        (XML, True, None),
        (tiny_folder.CHAT_TEMPLATE, False, None),
        (None, False, None),
    ],
)
def test_what_a_template_does_tells_what_it_knows(
    text: str | None, accepts_tools: bool, name: str | None
) -> None:
    template = template_of(text)
    found = template.find_tool_call_format()
    assert (template.accepts_tools, found.name if found else None) == (accepts_tools, name)


@pytest.mark.parametrize(
    ("text", "call", "returned"),
    [
        (QWEN, '<tool_call>\n{"name": "get", "arguments": {"city": "Köln", "days": [1, 2]}}\n'
         "</tool_call>", "<tool_response>\nrain\n</tool_response>"),
        (LLAMA, '{"name": "get", "parameters": {"city": "Köln", "days": [1, 2]}}', '"rain"'),
        (MISTRAL_V3, '[TOOL_CALLS] [{"name": "get", "arguments": {"city": "Köln", '
         '"days": [1, 2]}, "id": "abcdefgh1"}]', '{"content": "rain", "call_id": "abcdefgh1"}'),
    ],
)  # fmt: skip
def test_calls_and_what_they_returned_go_back_into_the_prompt(
    text: str, call: str, returned: str
) -> None:
    prompt = template_of(text).render([ASKED, CALLED, RETURNED], [TOOL])
    assert call in prompt
    assert returned in prompt.partition(call)[2]


@pytest.mark.parametrize("text", [QWEN, LLAMA, MISTRAL_V3])
def test_tools_stand_in_the_prompt_only_where_they_are_offered(text: str) -> None:
    template = template_of(text)
    assert '"name": "get"' in template.render([ASKED], [TOOL])
    assert "get" not in template.render([ASKED])


def test_tools_are_refused_where_the_template_would_leave_them_out() -> None:
    with pytest.raises(InvalidRequestError, match="knows no tools") as caught:
        template_of(tiny_folder.CHAT_TEMPLATE).render([ASKED], [TOOL])
    assert caught.value.param == "tools"


def test_what_a_template_says_of_calls_is_told() -> None:
    twice = ChatMessage("assistant", (), (CALL, CALL))
    with pytest.raises(InvalidRequestError, match="single tool-calls"):
        template_of(LLAMA).render([ASKED, twice], [TOOL])


def test_a_template_that_stumbles_over_a_tool_refuses_it_alone() -> None:
    template = template_of(STUMBLING)
    assert "get takes object" in template.render([ASKED], [TOOL])
    with pytest.raises(InvalidRequestError, match="can't show these tools") as caught:
        template.render([ASKED], [Tool("get", None, '{"type": ["object"]}')])
    assert caught.value.param == "tools"


def test_the_configuration_wins_over_what_is_found() -> None:
    template = template_of(QWEN)
    assert choose_tool_call_format("auto", template) is HERMES
    assert choose_tool_call_format("mistral", template) is MISTRAL
    assert choose_tool_call_format("none", template) is None


def test_marks_that_are_special_tokens_are_known_by_their_ids() -> None:
    tokenizer = byte_tokenizer()
    assert special_marks(tokenizer, MISTRAL) == ()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    tokenizer.add_tokens(["<tool_call>"])
    token_id = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    assert special_marks(tokenizer, MISTRAL) == (("[TOOL_CALLS]", token_id),)
    assert special_marks(tokenizer, HERMES) == ()
    assert special_marks(tokenizer, None) == ()
