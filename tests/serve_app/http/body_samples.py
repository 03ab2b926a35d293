"""A body for each route and each of its fields, which the server accepts as it stands.

Fields that exclude each other are in bodies of their own.
"""

import json
from typing import Any

from PIL import Image

from serve_app.api.body.strict_body import StrictBody
from serve_app.api.chat.schema import ChatRequest
from serve_app.api.classify.schema import ClassifyBody, VllmClassifyBody
from serve_app.api.completions.schema import CompletionRequest
from serve_app.api.messages.schema import MessagesRequest, PromptFields
from serve_app.api.responses.schema import ResponsesRequest
from serve_app.api.text_generation.schema import TextGenerationRequest
from serve_app.api.tokenize.schema import DetokenizeBody, TokenizeBody
from tests.images import data_uri

ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""The JSON schema of all samples. The words about mistakes in a schema are another module's."""
IMAGE = data_uri(Image.new("RGB", (3, 2)))
CACHE = {"type": "ephemeral"}
CALL = {
    "id": "c",
    "type": "function",
    "function": {"name": "f", "arguments": "{}", "parsed_arguments": {}},
    "cache_control": CACHE,
}
REASONED = {"reasoning": "Hm.", "reasoning_content": "Hm."}
MESSAGES: list[Any] = [
    {
        "role": "user",
        "name": "me",
        "cache_control": CACHE,
        "content": [
            {"type": "text", "text": "hi", "cache_control": CACHE},
            {
                "type": "image_url",
                "image_url": {"url": IMAGE, "detail": "low"},
                "cache_control": CACHE,
            },
        ],
    },
    {
        "role": "assistant",
        "content": "a",
        "refusal": "No.",
        "tool_calls": [CALL],
        "parsed": {},
        "provider_specific_fields": REASONED,
        **REASONED,
    },
    {"role": "tool", "tool_call_id": "c", "content": "b"},
]
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "cache_control": CACHE,
        "function": {
            "name": "f",
            "description": "F.",
            "parameters": ANY_OBJECT,
            "strict": True,
            "cache_control": CACHE,
        },
    }
]
SAMPLING: dict[str, Any] = {
    "max_tokens": 5, "temperature": 1, "top_p": 1, "top_k": 1, "min_p": 0, "repetition_penalty": 1,
    "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {"1": 1}, "min_tokens": 1,
    "seed": 1, "stop": ["x"], "stop_token_ids": [1], "ignore_eos": False,
}  # fmt: skip
ANSWER: dict[str, Any] = {
    "model": "m", "stream": True, "n": 1, "user": "u", "priority": 1,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}  # fmt: skip
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {"name": "s", "description": "S.", "schema": ANY_OBJECT, "strict": True},
}
SCHEMA_FORMAT = {"type": "json_schema", **SCHEMA["json_schema"]}
CONSTRAINTS: dict[str, Any] = {"regex": "a", "choice": ["a"], "grammar": 'start: "a"'}
TAG: dict[str, Any] = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "json_schema", "json_schema": ANY_OBJECT},
    "end": "</a>",
}
ALL_FORMATS: dict[str, Any] = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "const_string", "value": "a"},
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": "b"},
                    {"type": "grammar", "grammar": 'start: "c"'},
                ],
            },
            {
                "type": "tags_with_separator",
                "tags": [TAG],
                "separator": ",",
                "at_least_one": True,
                "stop_after_first": False,
            },
            {
                "type": "triggered_tags",
                "triggers": ["<"],
                "tags": [{**TAG, "content": {"type": "any_text"}}],
                "at_least_one": True,
                "stop_after_first": False,
            },
        ],
    },
}
OLDER_TAG: dict[str, Any] = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": ANY_OBJECT, "end": "</a>"}],
    "triggers": ["<"],
}
ON_EACH_SURFACE: list[dict[str, Any]] = [
    {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
    {
        "guided_json": ANY_OBJECT,
        "guided_whitespace_pattern": " ?",
        "guided_decoding_backend": "xgrammar",
    },
    *({f"guided_{name}": value} for name, value in CONSTRAINTS.items()),
    {"structural_tag": json.dumps(OLDER_TAG)},
]
ON_ONE_SURFACE: list[dict[str, Any]] = [
    {"structured_outputs": {"structural_tag": OLDER_TAG}},
    {"structured_outputs": {"structural_tag": json.dumps(OLDER_TAG)}},
    {
        "structured_outputs": {
            "json": ANY_OBJECT,
            "disable_any_whitespace": False,
            "disable_additional_properties": True,
            "whitespace_pattern": " ?",
        }
    },
    *({"structured_outputs": {name: value}} for name, value in CONSTRAINTS.items()),
    {"response_format": OLDER_TAG},
]
"""With `ON_EACH_SURFACE`, all constraints on the text. They exclude each other."""
PLAIN: dict[str, Any] = {"stream": False, "prompt": "hi"}
TEXT_BLOCK = {"type": "text", "text": "a", "cache_control": CACHE, "parsed_output": {}}
MESSAGES_PROMPT: dict[str, Any] = {
    "model": "m",
    "system": [TEXT_BLOCK],
    "messages": [
        {
            "role": "user",
            "content": [
                TEXT_BLOCK,
                {
                    "type": "image",
                    "source": {
                        "type": "base64",
                        "media_type": "image/png",
                        "data": IMAGE.partition(",")[2],
                    },
                    "cache_control": CACHE,
                },
                {"type": "image", "source": {"type": "url", "url": IMAGE}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                TEXT_BLOCK,
                {
                    "type": "tool_use",
                    "id": "c",
                    "name": "f",
                    "input": ANY_OBJECT,
                    "cache_control": CACHE,
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c",
                    "content": [TEXT_BLOCK],
                    "is_error": True,
                    "cache_control": CACHE,
                }
            ],
        },
        {"role": "system", "content": "b"},
    ],
    "tools": [
        {
            "name": "f",
            "description": "F.",
            "input_schema": ANY_OBJECT,
            "type": "custom",
            "strict": True,
            "cache_control": CACHE,
            "defer_loading": True,
            "eager_input_streaming": True,
            "input_examples": [{"a": 1}],
        },
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
    ],
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "cache_control": CACHE,
}
RESPONSES_TOOL = {
    "type": "function",
    "name": "f",
    "description": "F.",
    "parameters": ANY_OBJECT,
    "strict": True,
    "defer_loading": True,
}
NAMESPACE = {"type": "namespace", "name": "n", "description": "N.", "tools": [RESPONSES_TOOL]}
RESPONSES_INPUT: list[Any] = [
    {
        "type": "message",
        "role": "user",
        "content": [
            {"type": "input_text", "text": "a", "parsed": {}},
            {"type": "input_image", "image_url": IMAGE, "detail": "low"},
        ],
        "id": "m",
        "status": "completed",
    },
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": "a"}],
        "content": [{"type": "reasoning_text", "text": "a"}],
        "id": "r",
        "status": "completed",
    },
    {
        "type": "function_call",
        "call_id": "c",
        "name": "f",
        "namespace": "n",
        "arguments": "{}",
        "id": "i",
        "status": "completed",
        "parsed_arguments": {},
    },
    {
        "type": "function_call_output",
        "call_id": "c",
        "output": "a",
        "id": "o",
        "status": "completed",
    },
]
SHORT_MESSAGES: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": HI}
SURFACES: list[tuple[str, type[StrictBody], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatRequest, {"model": "m", "messages": HI}),
    ("/v1/completions", CompletionRequest, {"model": "m", "prompt": "hi"}),
    ("/text-generation", TextGenerationRequest, PLAIN),
]
SAMPLES: list[tuple[str, type[StrictBody], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatRequest, {
        **SAMPLING, **ANSWER, "messages": MESSAGES, "max_completion_tokens": 5,
        "logprobs": True, "top_logprobs": 1, "tools": TOOLS, "parallel_tool_calls": True,
        "tool_choice": {"type": "function", "function": {"name": "f"}}, "metadata": {},
        "safety_identifier": "s", "prompt_cache_key": "p",
        "chat_template_kwargs": {"a": True}, "reasoning_effort": "none",
        "include_reasoning": False,
    }),
    ("/v1/chat/completions", ChatRequest,
     {"model": "m", "messages": HI, "response_format": SCHEMA, "prompt_logprobs": 1}),
    *(
        (route, body, {**needed, **fields})
        for route, body, needed in SURFACES
        for fields in ON_EACH_SURFACE
    ),
    *(("/text-generation", TextGenerationRequest, {**PLAIN, **each}) for each in ON_ONE_SURFACE),
    ("/v1/completions", CompletionRequest, {
        **SAMPLING, **ANSWER, "prompt": [[1]], "echo": False, "logprobs": 1, "best_of": 1,
        "prompt_logprobs": None,
        "response_format": {"type": "json_object"},
    }),
    ("/text-generation", TextGenerationRequest, {
        **SAMPLING, "model": "m", "stream": False, "prompt": "hi", "user_id": 1, "us_id": 1,
        "recommend": 1, "response_format": {"type": "text"},
    }),
    ("/text-generation", TextGenerationRequest,
     {"stream": False, "messages": HI, "chat_template_kwargs": {"a": 1}}),
    ("/tokenize", TokenizeBody, {
        "model": "m", "messages": HI, "add_special_tokens": True, "tools": TOOLS,
        "add_generation_prompt": True, "return_token_strs": True,
        "chat_template_kwargs": {"a": "b"},
    }),
    ("/tokenize", TokenizeBody, {"prompt": "hi"}),
    ("/detokenize", DetokenizeBody, {"model": "m", "tokens": [1]}),
    ("/v1/responses", ResponsesRequest, {
        "model": "m", "input": RESPONSES_INPUT, "instructions": "a", "max_output_tokens": 5,
        "temperature": 1, "top_p": 1, "stream": True, "stream_options": {},
        "tools": [RESPONSES_TOOL, NAMESPACE, {"type": "web_search", "filters": {}}],
        "parallel_tool_calls": True, "include": ["reasoning.encrypted_content"],
        "client_metadata": {"thread_id": "t"},
        "tool_choice": {"type": "function", "name": "f"}, "text": {"format": None},
        "reasoning": {"effort": "none"}, "store": True, "metadata": {}, "user": "u", "priority": 1,
        "safety_identifier": "s", "prompt_cache_key": "p",
        "previous_response_id": None, "background": False,
    }),
    ("/v1/responses", ResponsesRequest, {
        "model": "m", "input": "a", "tools": [RESPONSES_TOOL],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
        },
    }),
    ("/v1/chat/completions", ChatRequest, {
        "model": "m", "tools": TOOLS,
        "messages": [
            *HI, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, *HI
        ],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]
            },
        },
    }),
    *(
        ("/v1/responses", ResponsesRequest, {"model": "m", "input": "a", "text": {"format": form}})
        for form in ({"type": "text"}, {"type": "json_object"}, SCHEMA_FORMAT)
    ),
    ("/v1/messages/count_tokens", PromptFields,
     {**MESSAGES_PROMPT, "output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ("/v1/messages", MessagesRequest, {
        **MESSAGES_PROMPT, "max_tokens": 5, "stream": True, "stop_sequences": ["x"],
        "temperature": 1, "top_p": 1, "top_k": 1, "metadata": {"user_id": "u"},
    }),
    ("/v1/messages", MessagesRequest, {
        **SHORT_MESSAGES,
        "output_config": {
            "effort": None,
            "format": {"type": "json_schema", "schema": ANY_OBJECT},
        },
    }),
    *(
        (
            "/v1/messages",
            MessagesRequest,
            {**SHORT_MESSAGES, "tools": MESSAGES_PROMPT["tools"], "tool_choice": choice},
        )
        for choice in (
            {"type": "any", "disable_parallel_tool_use": True},
            {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
            {"type": "none"},
        )
    ),
    ("/v1/classify", ClassifyBody, {
        "model": "c", "input": ["a"], "user": "u", "priority": 1, "truncate": True, "top_k": 1,
        "split": {"max_chars": 5, "overlap": 1, "aggregate": "max"},
    }),
    ("/classify", VllmClassifyBody, {
        "model": "c", "input": "a", "user": "u", "truncate_prompt_tokens": -1,
        "request_id": "r", "priority": 1,
    }),
]  # fmt: skip
