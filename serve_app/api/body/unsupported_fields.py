"""Why fields of well-known APIs are not honoured here: one reason each, for the client to read."""

from collections.abc import Mapping
from typing import Final

_NO_BEAMS = "texts are sampled; there is no beam search"
_ONLY_TEXT = "the models answer only with text"
_NO_TEMPLATES = "the model's own chat template is always used"
_ONE_CLASS = "all requests have the same priority"
_NOT_STORED = "requests and answers are not stored"
_PROBABILITIES = "scores are probabilities, softmax or sigmoid as the model's configuration says"
_ONLY_CONTENT = "the model only sees a message's content, reasoning and tool calls"
_ONLY_CALLS = "the model only sees a call's id, name and arguments"
_NO_SUMMARIES = "reasoning is told as the model wrote it"
_CALLED_BY_CLIENTS = "all tools are functions of the client"
_USE_REASONING = "send an earlier turn's reasoning as text, in reasoning_content"

REASONS: Final[Mapping[str, str]] = {
    # OpenAI's
    "audio": _ONLY_TEXT,
    "best_of": "texts are not ranked; ask for n of them and choose",
    "function_call": "it is the older form of tool_choice, and in messages of tool_calls",
    "functions": "it is the older form of tools",
    "include_obfuscation": "chunks are not padded",
    "modalities": _ONLY_TEXT,
    "moderation": "there is no moderation model",
    "prediction": "a predicted text does not speed up the answer here",
    "prompt_cache_options": "prompts with a common beginning are found automatically",
    "prompt_cache_retention": "how long a prompt stays cached depends only on the load",
    "service_tier": _ONE_CLASS,
    "store": _NOT_STORED,
    "suffix": "the models continue a text and can't fill a gap",
    "verbosity": "ask for it in the prompt",
    "web_search_options": "the models do not search the web",
    # vLLM's
    "add_generation_prompt": "an answer always begins a turn",
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias",
    "chat_template": _NO_TEMPLATES,
    "documents": "put them into the messages",
    "kv_transfer_params": "prompts are computed where they are answered",
    "logits_processors": "use logit_bias",
    "return_tokens_as_token_ids": "use /tokenize",
    "vllm_xargs": "there are no extensions that read it",
    "continue_final_message": "an answer always begins a turn",
    "echo": "only /v1/completions can repeat the prompt",
    "include_stop_str_in_output": "the text ends before a stop string",
    "length_penalty": _NO_BEAMS,
    "mm_processor_kwargs": "images are processed as the model's configuration says",
    "priority": _ONE_CLASS,
    "return_token_ids": "use /tokenize",
    "skip_special_tokens": "special tokens are always left out of the text",
    "spaces_between_special_tokens": "special tokens are always left out of the text",
    "truncate_prompt_tokens": "a prompt that is too long is refused, not cut",
    "activation": _PROBABILITIES,
    "add_special_tokens": "the model is trained with them",
    "cache_salt": "cached prompts are shared by all requests, or by none (prefix_caching)",
    "messages": "texts are classified without a chat template; send them as input",
    "softmax": _PROBABILITIES,
    "truncation_side": "the end is dropped",
    "use_activation": _PROBABILITIES,
    "use_beam_search": _NO_BEAMS,
    # An image's
    "format": "it is read from the image itself",
    # Of OpenAI's responses
    "async": "an answer waits for no call",
    "context": "the chat template decides what the model sees of its reasoning",
    "encrypted_content": "reasoning is sent as text",
    "file_id": "no files are stored; send the image itself",
    "generate_summary": _NO_SUMMARIES,
    "mode": "the model's chat template has no such setting",
    "output_schema": "the model only sees a function's description and its parameters",
    "phase": _ONLY_CONTENT,
    "prompt_cache_breakpoint": "prompts with a common beginning are found without it",
    "summary": _NO_SUMMARIES,
    # Anthropic's
    "allowed_callers": _CALLED_BY_CLIENTS,
    "toolset_name": _CALLED_BY_CLIENTS,
    "transformations": "images are processed as the model's configuration says",
    # Echoed from answers, in messages, parts and calls
    "annotations": _ONLY_CONTENT,
    "caller": _ONLY_CALLS,
    "citations": _ONLY_CONTENT,
    "custom": "all tools are functions",
    "extra_content": _ONLY_CONTENT,
    "images": _ONLY_CONTENT,
    "logprobs": _ONLY_CONTENT,
    "provider_specific_fields": _ONLY_CONTENT,
    "reasoning_details": _USE_REASONING,
    "reasoning_items": _USE_REASONING,
    "thinking_blocks": _USE_REASONING,
    "thought_signature": _ONLY_CALLS,
}
