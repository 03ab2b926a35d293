"""The fields of well-known APIs that are not honoured here: why, and which bodies know them."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from serve_app.config import MAX_NUM_TOOLS


class Unsupported(NamedTuple):
    """A field that is known but not honoured.

    Attributes:
        why: The end of a sentence, for the client to read; empty if there is nothing to add.
        harmless: The values that ask for nothing, besides null.
    """

    why: str
    harmless: tuple[Any, ...]


def _field(why: str, *harmless: Any) -> Unsupported:
    return Unsupported(why, harmless)


_NO_BEAMS = "texts are sampled; there is no beam search"
_ONLY_TEXT = "the models answer only with text"
_NO_TEMPLATES = "the model's own chat template is always used"
_BEGINS_A_TURN = "an answer always begins a turn"
_BY_KEY = "the priority of the API key says how soon its requests run"
_NOT_STORED = "requests and answers are not stored"
_SEND_ALL = "there are no conversations; send previous_response_id, or all of it as input"
_PROBABILITIES = "scores are probabilities, softmax or sigmoid as the model's configuration says"
_OWN_FUNCTION = "the model's own files name the function"
_ONLY_CONTENT = "the model only sees a message's content, reasoning and tool calls"
_ONLY_CALLS = "the model only sees a call's id, name and arguments"
_ONLY_PARAMETERS = "the model only sees a function's description and its parameters"
_NO_SUMMARIES = "reasoning is told as the model wrote it"
_OF_CLIENTS = "all tools are functions of the client"
_USE_REASONING = "send an earlier turn's reasoning as text, in reasoning_content"
_AS_SENT = "a conversation is read as it is sent"
_AS_CONFIGURED = "images are processed as the model's configuration says"
_COHERE = "this is Cohere's and Jina's shape"
_NO_BILLS = "there are no bills"
_ONLY_KEYS = "there are only API keys"
_NOT_CUT = "a prompt that is too long is refused, not cut"
_NOT_SPECIAL = "special tokens are always left out of the text"
_NO_MESSAGES = "without a chat template; send them as input"
_OLDER_CALL = "it is the older form of tool_choice, and in messages of tool_calls"
_PROMPT_NAME = "send prompt_name, a name in the model's config_sentence_transformers.json"
_TAKE_INPUT = "POST /v1/classify and /v1/embeddings take input"
_TAKES_MESSAGES = "this route answers messages"
_TAKES_A_PROMPT = "this route continues a prompt"

UNSUPPORTED: Final[Mapping[str, Unsupported]] = {
    # OpenAI's
    "audio": _field(_ONLY_TEXT),
    "best_of": _field("texts are not ranked; ask for n of them and choose", 1),
    "function_call": _field(_OLDER_CALL, "none"),
    "functions": _field("it is the older form of tools", []),
    "include_obfuscation": _field("chunks are not padded", False),
    "modalities": _field(_ONLY_TEXT, ["text"]),
    "moderation": _field("there is no moderation model"),
    "prediction": _field("a predicted text does not speed up the answer here"),
    "prompt_cache_options": _field("prompts with a common beginning are found automatically"),
    "prompt_cache_retention": _field("how long a prompt stays cached depends only on the load"),
    "service_tier": _field(_BY_KEY, "auto", "default"),
    "store": _field(_NOT_STORED, False),
    "suffix": _field("the models continue a text and can't fill a gap", ""),
    "verbosity": _field("ask for it in the prompt", "medium"),
    "web_search_options": _field("the models do not search the web"),
    # Clients that join the deltas of a stream leave the index in.
    "index": _field("", *range(MAX_NUM_TOOLS)),
    # vLLM's
    "activation": _field(_OWN_FUNCTION, True),
    "VllmClassifyBody.activation": _field(_PROBABILITIES, True),
    "add_generation_prompt": _field(_BEGINS_A_TURN, True),
    "add_special_tokens": _field("the model is trained with them", True),
    "allowed_token_ids": _field("use logit_bias"),
    "bad_words": _field("use logit_bias", []),
    "cache_salt": _field("cached prompts are shared by all requests, or by none (prefix_caching)"),
    "chat_template": _field(_NO_TEMPLATES),
    "continue_final_message": _field(_BEGINS_A_TURN, False),
    "documents": _field("put them into the messages", []),
    "echo": _field("only /v1/completions can repeat the prompt", False),
    "embed_dtype": _field("numbers are float32", "float32"),
    "endianness": _field("base64 is little-endian", "little", "native"),
    "excluded_str": _field("", []),
    "excludes": _field("", []),
    "include_stop_str_in_output": _field("the text ends before a stop string", False),
    "kv_transfer_params": _field("prompts are computed where they are answered", {}),
    "length_penalty": _field(_NO_BEAMS, 1),
    "logits_processors": _field("use logit_bias", []),
    "mm_processor_kwargs": _field(_AS_CONFIGURED, {}),
    "return_token_ids": _field("use /tokenize", False),
    "return_tokens_as_token_ids": _field("use /tokenize", False),
    "skip_special_tokens": _field(_NOT_SPECIAL, True),
    "VllmClassifyBody.softmax": _field(_PROBABILITIES, True),
    "RerankBody.softmax": _field("each document is scored by itself", True),
    "ScoreBody.softmax": _field("each pair is scored by itself", True),
    "spaces_between_special_tokens": _field(_NOT_SPECIAL, True),
    "style": _field("", "json"),
    "truncate_prompt_tokens": _field(_NOT_CUT),
    "truncation_side": _field("the end is dropped", "right"),
    "use_activation": _field(_OWN_FUNCTION, True),
    "VllmClassifyBody.use_activation": _field(_PROBABILITIES, True),
    "use_beam_search": _field(_NO_BEAMS, False),
    "vllm_xargs": _field("there are no extensions that read it", {}),
    # An image's
    "format": _field("it is read from the image itself", ""),
    # Other routes' and other servers' names of what a route takes
    "ChatRequest.input": _field(f"{_TAKES_MESSAGES}; {_TAKE_INPUT}"),
    "ChatRequest.prompt": _field(f"{_TAKES_MESSAGES}; POST /v1/completions continues a prompt"),
    "CompletionRequest.input": _field(f"{_TAKES_A_PROMPT}; {_TAKE_INPUT}"),
    "CompletionRequest.messages": _field(
        f"{_TAKES_A_PROMPT}; POST /v1/chat/completions answers messages"
    ),
    "VllmClassifyBody.messages": _field(f"texts are classified {_NO_MESSAGES}"),
    "EmbeddingsBody.messages": _field(f"texts are embedded {_NO_MESSAGES}"),
    "EmbeddingsBody.prompt": _field("put it before the text, or send prompt_name"),
    "input_type": _field(_PROMPT_NAME),
    "data_1": _field("send text_1"),
    "data_2": _field("send text_2"),
    "ScoreBody.documents": _field("send text_2"),
    "items": _field("send text_2"),
    "queries": _field("send text_1"),
    "ScoreBody.instruction": _field("the model reads only the two texts"),
    "instruction": _field("the model reads the query and a document; put it into the query"),
    "max_chunks_per_doc": _field("a document is read as one text; send max_tokens_per_doc"),
    "rank_fields": _field(
        "a document is read by its text; put the other fields into it", [], ["text"]
    ),
    "raw_scores": _field(f"{_COHERE}: a score is relevance_score", False),
    "return_text": _field(f"{_COHERE}: send return_documents"),
    "texts": _field(f"{_COHERE}: send documents"),
    # Of OpenAI's responses
    "access_programs": _field("all requests have the same rights"),
    "async": _field("an answer waits for no call", False),
    "context": _field("the chat template decides what the model sees of its reasoning", "auto"),
    "context_management": _field(_AS_SENT, []),
    "conversation": _field(_SEND_ALL),
    "encrypted_content": _field("reasoning is sent as text", ""),
    "file_id": _field("no files are stored; send the image itself"),
    "generate_summary": _field(_NO_SUMMARIES, "auto"),
    "image": _field(_AS_CONFIGURED),
    "max_tool_calls": _field("the client makes the calls"),
    "mode": _field("the model's chat template has no such setting", "standard"),
    "output_schema": _field(_ONLY_PARAMETERS),
    "phase": _field(_ONLY_CONTENT, "commentary", "final_answer"),
    "prompt": _field("there are no stored prompts"),
    "prompt_cache_breakpoint": _field("prompts with a common beginning are found without it"),
    "summary": _field(_NO_SUMMARIES, "auto"),
    "top_logprobs": _field("ask /v1/chat/completions for log-probabilities", 0),
    "truncation": _field(_NOT_CUT, "disabled"),
    # Anthropic's
    "allowed_callers": _field(_OF_CLIENTS, ["direct"]),
    "billing_policy": _field(_NO_BILLS),
    "compaction": _field(_AS_SENT),
    "container": _field("no code runs here"),
    "diagnostics": _field(_NOT_STORED, {}),
    "fallback_credit_token": _field(_NO_BILLS),
    "fallbacks": _field("the model that is named answers, or none", []),
    "inference_geo": _field("answers are made where this server runs"),
    "mcp_servers": _field("all tools are the client's own", []),
    "output_format": _field("it is the older form of output_config.format"),
    "MessagesRequest.service_tier": _field(_BY_KEY, "auto", "standard_only"),
    "speed": _field(_BY_KEY, "standard"),
    "thread": _field(f"{_NOT_STORED}; give the SDK's tool runner thread=False"),
    "toolset_name": _field(_OF_CLIENTS),
    "transformations": _field(_AS_CONFIGURED, {}),
    "user_profile_id": _field(_ONLY_KEYS),
    "workspace_id": _field(_ONLY_KEYS),
    # Echoed from answers, in messages, parts and calls
    "annotations": _field(_ONLY_CONTENT),
    "caller": _field(_ONLY_CALLS, {"type": "direct"}),
    "citations": _field(_ONLY_CONTENT),
    "custom": _field("all tools are functions"),
    "extra_content": _field(_ONLY_CONTENT),
    "images": _field(_ONLY_CONTENT),
    "logprobs": _field(_ONLY_CONTENT),
    "provider_specific_fields": _field(_ONLY_CONTENT),
    "reasoning_details": _field(_USE_REASONING),
    "reasoning_items": _field(_USE_REASONING),
    "thinking_blocks": _field(_USE_REASONING),
    "thought_signature": _field(_ONLY_CALLS),
}
"""Each field by its name. `BODY.NAME` goes before `NAME`, where one body says it differently."""

_SCORED = "activation instruction mm_processor_kwargs softmax truncation_side use_activation"

BODIES: Final[Mapping[str, str]] = {
    "AnswerFields": "allowed_token_ids bad_words cache_salt include_stop_str_in_output "
    "kv_transfer_params length_penalty logits_processors return_token_ids "
    "return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens "
    "truncate_prompt_tokens use_beam_search vllm_xargs",
    "AnyText": "excludes excluded_str",
    "ChatRequest": "audio function_call functions modalities moderation prediction "
    "prompt_cache_options prompt_cache_retention service_tier store verbosity web_search_options "
    "add_generation_prompt best_of chat_template continue_final_message documents echo "
    "mm_processor_kwargs input prompt",
    "CompletionRequest": "add_special_tokens suffix input messages",
    "EmbeddingsBody": "add_special_tokens cache_salt embed_dtype endianness input_type messages "
    "mm_processor_kwargs prompt truncation_side",
    "FunctionCallItem": "async caller",
    "FunctionOutputItem": "caller",
    "FunctionTool": "allowed_callers async output_schema",
    "ImageBlock": "transformations",
    "ImageUrlBody": "format",
    "InputImage": "file_id prompt_cache_breakpoint",
    "InputText": "prompt_cache_breakpoint",
    "JsonSchemaContent": "style",
    "MessageItem": "phase",
    "MessagesRequest": "billing_policy container fallback_credit_token fallbacks diagnostics "
    "inference_geo output_format service_tier",
    "MessagesTool": "allowed_callers",
    "PromptFields": "compaction mcp_servers speed thread user_profile_id workspace_id",
    "ReasoningConfig": "context generate_summary mode summary",
    "ReasoningItem": "encrypted_content",
    "RegexContent": "excludes",
    "RerankBody": f"{_SCORED} max_chunks_per_doc rank_fields raw_scores return_text texts",
    "ResponsesRequest": "access_programs context_management conversation image "
    "max_tool_calls moderation prompt prompt_cache_options "
    "prompt_cache_retention service_tier top_logprobs truncation",
    "ResponsesStreamOptions": "include_obfuscation",
    "ScoreBody": f"{_SCORED} data_1 data_2 documents items queries",
    "StreamOptions": "include_obfuscation",
    "TextConfig": "verbosity",
    "TokenizeBody": "chat_template continue_final_message mm_processor_kwargs",
    "ToolCallBody": "index",
    "ToolResultBlock": "toolset_name",
    "ToolUseBlock": "caller toolset_name",
    "TriggeredTags": "excludes",
    "VllmClassifyBody": "activation add_special_tokens cache_salt messages mm_processor_kwargs "
    "softmax truncation_side use_activation",
}
"""The fields that each body knows, by the name of its class. Classes below it know them, too."""


def unsupported_in(body: type) -> Mapping[str, Unsupported]:
    """Return the fields that a body knows but does not honour, each by its name."""
    return {
        name: UNSUPPORTED.get(f"{kind.__name__}.{name}") or UNSUPPORTED[name]
        for kind in reversed(body.__mro__)
        for name in BODIES.get(kind.__name__, "").split()
    }
