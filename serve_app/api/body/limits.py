"""Checks the limits on one request that need its whole body, but no tokenizer.

Each error names the offending field and the limit in serve_config.yaml. `json_route` checks the
limits that apply while the body is read, and `images` checks the limits on images.
"""

from collections.abc import Iterator, Sequence

from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import ChatMessage, TextPart
from serve_app.config import LimitsConfig

Prompt = tuple[ChatMessage, ...] | str | tuple[int, ...]


def check_messages(messages: Sequence[object], limits: LimitsConfig) -> None:
    """Refuse a conversation with too many messages.

    Raises:
        InvalidRequestError: There are more than `max_num_messages`.
    """
    if len(messages) > limits.max_num_messages:
        raise InvalidRequestError(
            f"The request holds {len(messages)} messages; at most {limits.max_num_messages} are "
            "accepted (limits.max_num_messages).",
            "messages",
        )


def check_prompts(prompts: Sequence[Prompt], limits: LimitsConfig) -> None:
    """Refuse prompts whose text would take long to tokenize; the model bounds token ids.

    Raises:
        InvalidRequestError: The prompts' text exceeds `max_prompt_bytes` in total.
    """
    num_bytes = sum(num_utf8_bytes(text) for prompt in prompts for text in _texts(prompt))
    if num_bytes > limits.max_prompt_bytes:
        raise InvalidRequestError(
            f"The prompt has {num_bytes} bytes of text; at most {limits.max_prompt_bytes} are "
            "accepted (limits.max_prompt_bytes).",
            "prompt" if isinstance(prompts[0], str) else "messages",
        )


def check_num_choices(num_choices: int, limits: LimitsConfig) -> None:
    """Refuse too many answers to one request.

    Raises:
        InvalidRequestError: There would be more than `max_num_choices`.
    """
    if num_choices > limits.max_num_choices:
        raise InvalidRequestError(
            f"n must be at most {limits.max_num_choices} (limits.max_num_choices).", "n"
        )


def check_stops(stops: Sequence[str], limits: LimitsConfig, param: str) -> None:
    """Refuse stop strings that are too many or too long; the error names the field `param`.

    Raises:
        InvalidRequestError: They exceed `max_num_stops` or `max_stop_bytes`.
    """
    if len(stops) > limits.max_num_stops:
        raise InvalidRequestError(
            f"{param} must hold at most {limits.max_num_stops} strings (limits.max_num_stops).",
            param,
        )
    if any(num_utf8_bytes(stop) > limits.max_stop_bytes for stop in stops):
        raise InvalidRequestError(
            f"A stop string must have at most {limits.max_stop_bytes} bytes "
            "(limits.max_stop_bytes).",
            param,
        )


def check_texts(texts: Sequence[str], limits: LimitsConfig, param: str = "input") -> None:
    """Refuse texts that are too many, or too long in total.

    Args:
        texts: The texts.
        limits: The limits.
        param: The request's field that holds them.

    Raises:
        InvalidRequestError: They exceed `max_num_texts` or `max_prompt_bytes`.
    """
    if len(texts) > limits.max_num_texts:
        raise InvalidRequestError(
            f"The request holds {len(texts)} texts; at most {limits.max_num_texts} are accepted "
            "(limits.max_num_texts). Send several requests.",
            param,
        )
    check_text_bytes(sum(map(num_utf8_bytes, texts)), limits, param=param)


def check_text_bytes(
    num_text_bytes: int, limits: LimitsConfig, what: str = "texts", param: str = "input"
) -> None:
    """Refuse texts, or pieces of texts, that are too long in total.

    Raises:
        InvalidRequestError: They exceed `max_prompt_bytes`.
    """
    if num_text_bytes > limits.max_prompt_bytes:
        raise InvalidRequestError(
            f"The {what} have {num_text_bytes} bytes or more; at most {limits.max_prompt_bytes} "
            "are accepted in one request (limits.max_prompt_bytes). Send several requests.",
            param,
        )


def _texts(prompt: Prompt) -> Iterator[str]:
    if isinstance(prompt, str):
        yield prompt
        return
    for message in prompt:
        if isinstance(message, ChatMessage):
            yield from (part.text for part in message.parts if isinstance(part, TextPart))
            yield from (call.arguments for call in message.tool_calls)
            yield message.reasoning_content or ""


def num_utf8_bytes(text: str) -> int:
    """Return a text's length in UTF-8."""
    # `isascii` only reads a flag; an ASCII text need not be encoded to be measured.
    return len(text) if text.isascii() else len(text.encode())
