"""Why fields of well-known APIs are not honoured here: one line each, for the client to read."""

from collections.abc import Mapping
from typing import Final

_NO_BEAMS = "texts are sampled, not searched for"
_TEXT_ALONE = "the models answer in text alone"
_NO_TEMPLATES = "the model's own chat template is used, and takes nothing from a request"
_ONE_CLASS = "all requests are of one class"
_NO_REASONING = "the models tell no reasoning apart from the answer"
_NOTHING_KEPT = "nothing is kept"
_PROBABILITIES = "scores are probabilities, softmax or sigmoid as the model's configuration says"
_USE_A_SCHEMA = "use response_format, with a JSON schema"

REASONS: Final[Mapping[str, str]] = {
    # OpenAI's
    "audio": _TEXT_ALONE,
    "best_of": "texts are not ranked; ask for n of them and choose",
    "function_call": "it is the older form of tool_choice",
    "functions": "it is the older form of tools",
    "include_obfuscation": "chunks are not padded",
    "modalities": _TEXT_ALONE,
    "moderation": "no moderation model is run",
    "prediction": "a predicted text makes nothing faster here",
    "prompt_cache_options": "prompts that begin alike are found without being told",
    "prompt_cache_retention": "how long a prompt is kept depends on the load alone",
    "reasoning_effort": _NO_REASONING,
    "service_tier": _ONE_CLASS,
    "store": _NOTHING_KEPT,
    "suffix": "the models continue a text and can't fill a gap",
    "verbosity": "ask for it in the prompt",
    "web_search_options": "nothing is searched",
    # vLLM's
    "add_generation_prompt": "an answer always begins a turn",
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias",
    "chat_template": _NO_TEMPLATES,
    "chat_template_kwargs": _NO_TEMPLATES,
    "continue_final_message": "an answer always begins a turn",
    "echo": "only /v1/completions repeats its prompt",
    "guided_choice": _USE_A_SCHEMA,
    "guided_grammar": _USE_A_SCHEMA,
    "guided_json": _USE_A_SCHEMA,
    "guided_regex": _USE_A_SCHEMA,
    "include_reasoning": _NO_REASONING,
    "include_stop_str_in_output": "the text ends before a stop string",
    "length_penalty": _NO_BEAMS,
    "mm_processor_kwargs": "images are read in the model's own way",
    "priority": _ONE_CLASS,
    "prompt_logprobs": "only the answer's tokens have log-probabilities",
    "return_token_ids": "use /tokenize",
    "skip_special_tokens": "special tokens are no text",
    "spaces_between_special_tokens": "special tokens are no text",
    "structured_outputs": _USE_A_SCHEMA,
    "truncate_prompt_tokens": "a prompt that is too long is refused, not cut",
    "activation": _PROBABILITIES,
    "add_special_tokens": "the model is trained with them",
    "cache_salt": _NOTHING_KEPT,
    "messages": "texts are classified as they stand; send them as input",
    "softmax": _PROBABILITIES,
    "truncation_side": "the end is dropped",
    "use_activation": _PROBABILITIES,
    "use_beam_search": _NO_BEAMS,
    # A message's
    "annotations": "the model sees the content alone",
    "reasoning_content": "the model sees the content alone",
    "refusal": "the model sees the content alone",
    "detail": "images are read in the model's own way",
}


def reason_against(name: str) -> str:
    """Return the end of a sentence that says why a field is not honoured; nothing if none is."""
    reason = REASONS.get(name)
    return "" if reason is None else f": {reason}"
