"""The families' templates, reduced to the parts that concern tools."""

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from deployments.contract.errors import InvalidRequestError
from deployments.contract.formats.tool_call_format import HERMES, MISTRAL
from deployments.contract.messages import ChatMessage, ImagePart, TextPart, Tool, ToolCall
from deployments.contract.unsupported_model import UnsupportedModelError
from deployments.generator.chat_template import ChatTemplate, choose_tool_call_format, special_marks
from tests.deployments import tiny_folder
from tests.engine.tiny_models import byte_tokenizer
from tests.generator import tiny_processor

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
QWEN_3 = QWEN.replace(
    "{{- tool_call.arguments | tojson }}",
    "{%- if tool_call.arguments is string %}{{- tool_call.arguments }}"
    "{%- else %}{{- tool_call.arguments | tojson }}{%- endif %}",
).replace(
    "'\\n' + message.content",
    "'\\n' + (('<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n')"
    " if message.reasoning_content is string else '') + message.content",
)
ONE_BY_ONE = (
    QWEN.replace(
        """{{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}""",
        "{{- '<function=' + tool_call.name + '>' }}",
    )
    .replace(
        "{{- tool_call.arguments | tojson }}",
        "{%- for name, value in tool_call.arguments | items %}{{- '<' + name + '>' }}{{- value }}"
        "{%- endfor %}",
    )
    .replace("{{- '}\\n</tool_call>' }}", "{{- '</function>' }}")
)
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
FAILING = QWEN.replace(
    "{{- tool | tojson }}", "{{- tool.function.name + ' takes ' + tool.function.parameters.type }}"
)

CHANNELS = """
{%- if tools %}{% for tool in tools %}// {{ tool.function.description + tool.function.name }}
{% endfor %}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {%- if message.content and message.thinking %}{{ raise_exception("both") }}
            {%- elif message.content or message.thinking %}
                {{- '<|start|>assistant<|channel|>analysis<|message|>' }}
                {{- (message.content or message.thinking) + '<|end|>' }}
            {%- endif %}
            {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json' }}
            {{- '<|message|>' + call.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endif %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.get to=assistant<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}
"""
"""What gpt-oss's template does with messages."""

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
        (CHANNELS, True, "openai"),
        (MISTRAL_V3, True, "mistral"),
        (XML, True, None),
        (tiny_folder.CHAT_TEMPLATE, False, None),
        (None, False, None),
    ],
)
def test_probes_find_out_what_a_template_supports(
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
def test_calls_and_their_results_go_into_the_prompt(text: str, call: str, returned: str) -> None:
    prompt = template_of(text).render([ASKED, CALLED, RETURNED], [TOOL])
    assert call in prompt
    assert returned in prompt.partition(call)[2]


@pytest.mark.parametrize(
    ("text", "call"),
    [
        (QWEN, '{"name": "get", "arguments": "{\\"city\\": \\"Kö"}'),
        (QWEN_3, '{"name": "get", "arguments": {"city": "Kö}'),
        (LLAMA, '{"name": "get", "parameters": "{\\"city\\": \\"Kö"}'),
        (MISTRAL_V3, '{"name": "get", "arguments": "{\\"city\\": \\"Kö", "id"'),
        (ONE_BY_ONE, "<function=get></function>"),
    ],
)
def test_broken_arguments_are_in_the_prompt_as_the_template_can_write_them(
    text: str, call: str
) -> None:
    broken = ToolCall("abcdefgh1", "get", json.dumps('{"city": "Kö'))
    prompt = template_of(text).render([ASKED, replace(CALLED, tool_calls=(broken,)), RETURNED])
    assert call in prompt
    assert "rain" in prompt.partition(call)[2]


def test_a_template_that_goes_through_the_arguments_gets_whole_ones() -> None:
    call = "<function=get><city>Köln<days>[1, 2]</function>"
    assert call in template_of(ONE_BY_ONE).render([ASKED, CALLED, RETURNED])


def test_an_earlier_turn_s_reasoning_is_the_template_s_to_write() -> None:
    reasoned = ChatMessage("assistant", (TextPart("Rain."),), reasoning_content="Clouds, so")
    spoken = replace(reasoned, reasoning_content=None)
    assert "<think>\nClouds, so\n</think>\n\nRain." in template_of(QWEN_3).render([ASKED, reasoned])
    assert "<think>" not in template_of(QWEN_3).render([ASKED, spoken])
    assert template_of(QWEN).render([ASKED, reasoned]) == template_of(QWEN).render([ASKED, spoken])


@pytest.mark.parametrize("text", [QWEN, LLAMA, MISTRAL_V3])
def test_tools_are_in_the_prompt_only_if_they_are_offered(text: str) -> None:
    template = template_of(text)
    assert '"name": "get"' in template.render([ASKED], [TOOL])
    assert "get" not in template.render([ASKED])


def test_tools_are_refused_if_the_template_would_leave_them_out() -> None:
    with pytest.raises(InvalidRequestError, match="does not support tools") as caught:
        template_of(tiny_folder.CHAT_TEMPLATE).render([ASKED], [TOOL])
    assert caught.value.param == "tools"


def test_a_template_s_error_is_passed_on() -> None:
    twice = ChatMessage("assistant", (), (CALL, CALL))
    with pytest.raises(InvalidRequestError, match="single tool-calls"):
        template_of(LLAMA).render([ASKED, twice], [TOOL])


def test_only_the_tool_that_a_template_fails_on_is_refused() -> None:
    template = template_of(FAILING)
    assert "get takes object" in template.render([ASKED], [TOOL])
    with pytest.raises(InvalidRequestError, match="can't render these tools") as caught:
        template.render([ASKED], [Tool("get", None, '{"type": ["object"]}')])
    assert caught.value.param == "tools"


def test_the_configuration_overrides_the_detected_format() -> None:
    template = template_of(QWEN)
    assert choose_tool_call_format("auto", template) is HERMES
    assert choose_tool_call_format("mistral", template) is MISTRAL
    assert choose_tool_call_format("none", template) is None


def test_marks_that_are_special_tokens_are_returned_with_their_ids() -> None:
    tokenizer = byte_tokenizer()
    assert special_marks(tokenizer, MISTRAL) == ()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    tokenizer.add_tokens(["<tool_call>"])
    token_id = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    assert special_marks(tokenizer, MISTRAL) == (("[TOOL_CALLS]", token_id),)
    assert special_marks(tokenizer, HERMES) == ()
    assert special_marks(tokenizer, None) == ()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (tiny_folder.REASONING_TEMPLATE, "qwen3"),
        (tiny_folder.CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}", "qwen3"),
        (tiny_folder.CHAT_TEMPLATE, None),
        (QWEN, None),
        (CHANNELS, "openai_gptoss"),
        (None, None),
    ],
    ids=["drops reasoning", "begins it", "plain", "tools", "channels", "none"],
)
def test_probes_find_out_whether_a_template_knows_reasoning(
    text: str | None, name: str | None
) -> None:
    found = template_of(text).find_reasoning_format()
    assert (found.name if found else None) == name


@pytest.mark.parametrize("said", ["", "I look."])
def test_a_template_with_channels_gets_the_reasoning_before_a_call(said: str) -> None:
    called = ChatMessage("assistant", (TextPart(said),), (CALL,), reasoning_content="Hm.")
    text = template_of(CHANNELS).render([ASKED, called, RETURNED], [Tool("get", None, "{}")])
    thought = "\n".join(filter(None, ("Hm.", said)))
    assert (
        f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant to=functions.get" in text
    )
    assert text.endswith("<|start|>assistant")


READING = """
{%- if tools is not none %}{{ documents }}{% endif %}{{ bos_token }}{{ tokenize }}
{%- if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}
{%- for message in messages %}{{ loop.index }}{{ namespace(a=1).a }}{{ message.content }}
{%- if level is defined %}{{ 'level' * level }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ date_string }}{% endif %}
"""


def test_a_template_s_parameters_are_what_it_reads_and_the_renderer_does_not_set() -> None:
    assert template_of(READING).parameters == ("date_string", "level")
    assert template_of(tiny_folder.REASONING_TEMPLATE).parameters == ("enable_thinking",)
    assert template_of(tiny_folder.CHAT_TEMPLATE).parameters == ()
    assert template_of(None).parameters == ()


def test_a_request_may_set_a_template_s_parameters() -> None:
    template = template_of(tiny_folder.REASONING_TEMPLATE)
    assert template.render([ASKED]).endswith("<special1>assistant\n")
    off = template.render([ASKED], template_kwargs={"enable_thinking": False})
    assert off.endswith("<special1>assistant\n<think>\n\n</think>\n\n")
    assert template.render([ASKED], template_kwargs={"enable_thinking": None}) == (
        template.render([ASKED])
    )


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "messages", "documents", "tools", "bos_token", "other"]
)
def test_a_name_that_a_request_may_not_set_is_refused_with_those_it_may(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="date_string, level") as refused:
        template_of(READING).render([ASKED], template_kwargs={name: "x"})
    assert refused.value.param == f"chat_template_kwargs.{name}"


def test_of_a_template_that_reads_nothing_a_refusal_says_to_send_nothing() -> None:
    with pytest.raises(InvalidRequestError) as refused:
        template_of(tiny_folder.CHAT_TEMPLATE).render([ASKED], template_kwargs={"level": 1})
    assert str(refused.value.message) == (
        "This model's chat template does not read 'level'. Leave chat_template_kwargs out."
    )


def test_a_value_that_the_template_can_not_use_is_the_client_s_error() -> None:
    with pytest.raises(InvalidRequestError, match="Check the types") as refused:
        template_of(READING).render([ASKED], template_kwargs={"level": "high"})
    assert refused.value.param == "chat_template_kwargs"


PARTS = tiny_processor.CHAT_TEMPLATE
TEXT = tiny_folder.CHAT_TEMPLATE
BOTH = PARTS.replace(
    "{% for part in message.content %}",
    "{% if message.content is string %}{{ message.content }}{% set message = {} %}{% endif %}"
    "{% for part in message.content %}",
)
FIRST_PART = "{% for message in messages %}{{ message.content[0].text }};{% endfor %}"
SYSTEM_AS_TEXT = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ message.content | trim }};"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<special3>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %};{% endif %}{% endfor %}"
)
GEMMA_3 = (
    "{% if messages[0].role == 'system' %}"
    "{% if messages[0].content is string %}{{ messages[0].content }}"
    "{% else %}{{ messages[0].content[0].text }}{% endif %};"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<special3>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %};{% endfor %}"
)
"""Of a system message in parts, only the first is read; Gemma 3's template does the same."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    "{% for message in messages %}{{ message.content }};{% endfor %}"
)
BRIEF = ChatMessage("system", (TextPart("Be "), TextPart("brief.")))
PICTURE = ChatMessage("user", (TextPart("See "), ImagePart(b""), TextPart("this")))


def template_of_images(text: str | None, of_tokenizer: str | None = None) -> ChatTemplate:
    processor = tiny_processor.gemma3_processor()
    processor.chat_template = text
    processor.tokenizer.chat_template = of_tokenizer
    return ChatTemplate(processor.tokenizer, processor)


@pytest.mark.parametrize("text", [TEXT, PARTS, BOTH, FIRST_PART, SYSTEM_AS_TEXT, GEMMA_3])
def test_a_template_gets_the_whole_text_in_the_form_that_it_reads(text: str) -> None:
    for template in (template_of(text), template_of_images(text)):
        found = template.render([BRIEF, ASKED], add_generation_prompt=False)
        assert found.index("Be brief.") < found.index("Weather?")
        assert "type" not in found


@pytest.mark.parametrize(
    ("text", "written"),
    [
        (PARTS, "See <special3>this"),
        (BOTH, "See <special3>this"),
        (SYSTEM_AS_TEXT, "See <special3>this"),
        (GEMMA_3, "See <special3>this"),
        (TEXT, "<special3>\nSee this"),
        (FIRST_PART, "<special3>\nSee this"),
    ],
)
def test_an_image_gets_a_place_by_the_template_or_before_the_text(text: str, written: str) -> None:
    template = template_of_images(text)
    assert template.places_images
    assert written in template.render([PICTURE])
    assert not template_of(text).places_images


def test_what_a_template_without_system_turns_is_told_comes_from_the_user() -> None:
    for template in (template_of(NO_SYSTEM), template_of_images(NO_SYSTEM)):
        assert template.render([ASKED]) == "Weather?;"
        assert template.render([BRIEF, ASKED]) == "Be brief.;Weather?;"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for message in messages %}{{ message.text }}{% endfor %}", "leaves the text out"),
        ("{% if x %}", "Unexpected end of template"),
        ("{{ raise_exception('send a code') }}", "send a code"),
        ({"rag": TEXT}, "multiple chat templates"),
    ],
)
def test_a_template_that_reads_neither_form_is_refused(text: Any, reason: str) -> None:
    for make in (template_of, template_of_images):
        with pytest.raises(UnsupportedModelError, match="neither from a string nor") as refused:
            make(text)
        assert reason in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_template_for_tools_may_read_another_form() -> None:
    template = template_of({"default": TEXT, "tool_use": PARTS + "{{ tools | tojson }}"})  # type: ignore[arg-type] # of several
    assert template.accepts_tools
    for tools in ((), (TOOL,)):
        assert "<special1>user\nWeather?<special2>" in template.render([ASKED], tools)


def test_the_processor_s_template_comes_before_the_tokenizer_s() -> None:
    asked = [ASKED]
    own, other = "{% for m in messages %}own {{ m.content }}{% endfor %}", TEXT
    assert template_of_images(own, other).render(asked) == "own Weather?"
    assert template_of_images(None, own).render(asked) == "own Weather?"
    assert not template_of_images(None, None).exists
