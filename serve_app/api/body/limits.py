"""The limits on what one request may ask for that need the whole body, but no tokenizer.

Each refusal names the field that is to blame and the limit in serve_config.yaml. What is checked
while the body is still read stands in `request_guard`, what concerns images in `images`.
"""

from collections.abc import Iterator, Sequence

from deployments.contract import ChatMessage, TextPart
from deployments.errors import InvalidRequestError
from serve_app.config import LimitsConfig

Prompt = tuple[ChatMessage, ...] | str | tuple[int, ...]


def check_messages(messages: Sequence[object], limits: LimitsConfig) -> None:
    """Refuse a conversation of too many messages.

    Raises:
        InvalidRequestError: There are more than `max_num_messages`.
    """
    if len(messages) > limits.max_num_messages:
        raise InvalidRequestError(
            f"The request holds {len(messages)} messages; at most {limits.max_num_messages} are "
            "read (limits.max_num_messages).",
            "messages",
        )


def check_prompts(prompts: Sequence[Prompt], limits: LimitsConfig) -> None:
    """Refuse prompts whose tokenizing would take long; token ids are the model's to bound.

    Raises:
        InvalidRequestError: Their text has more than `max_prompt_bytes` together.
    """
    num_bytes = sum(num_utf8_bytes(text) for prompt in prompts for text in _texts(prompt))
    if num_bytes > limits.max_prompt_bytes:
        raise InvalidRequestError(
            f"The prompt has {num_bytes} bytes of text; at most {limits.max_prompt_bytes} are "
            "read (limits.max_prompt_bytes).",
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


def check_stops(stops: Sequence[str], limits: LimitsConfig) -> None:
    """Refuse stop strings that are too many or too long.

    Raises:
        InvalidRequestError: They exceed `max_num_stops` or `max_stop_bytes`.
    """
    if len(stops) > limits.max_num_stops:
        raise InvalidRequestError(
            f"stop must be of at most {limits.max_num_stops} strings (limits.max_num_stops).",
            "stop",
        )
    if any(num_utf8_bytes(stop) > limits.max_stop_bytes for stop in stops):
        raise InvalidRequestError(
            f"A stop string must have at most {limits.max_stop_bytes} bytes "
            "(limits.max_stop_bytes).",
            "stop",
        )


def check_texts(texts: Sequence[str], limits: LimitsConfig) -> None:
    """Refuse texts to classify that are too many, or too long together.

    Raises:
        InvalidRequestError: They exceed `max_num_texts` or `max_prompt_bytes`.
    """
    if len(texts) > limits.max_num_texts:
        raise InvalidRequestError(
            f"The request holds {len(texts)} texts; at most {limits.max_num_texts} are classified "
            "(limits.max_num_texts). Send several requests.",
            "input",
        )
    check_text_bytes(sum(map(num_utf8_bytes, texts)), limits)


def check_text_bytes(num_text_bytes: int, limits: LimitsConfig, what: str = "texts") -> None:
    """Refuse texts, or their pieces, that are too long together.

    Raises:
        InvalidRequestError: They exceed `max_prompt_bytes`.
    """
    if num_text_bytes > limits.max_prompt_bytes:
        raise InvalidRequestError(
            f"The {what} have {num_text_bytes} bytes or more; at most {limits.max_prompt_bytes} "
            "are read for one request (limits.max_prompt_bytes). Send several requests.",
            "input",
        )


def _texts(prompt: Prompt) -> Iterator[str]:
    if isinstance(prompt, str):
        yield prompt
        return
    for message in prompt:
        if isinstance(message, ChatMessage):
            yield from (part.text for part in message.parts if isinstance(part, TextPart))
            yield from (call.arguments for call in message.tool_calls)


def num_utf8_bytes(text: str) -> int:
    """Return how long a text is in UTF-8."""
    # Python knows of each string whether it is ASCII, and then nothing needs to be encoded.
    return len(text) if text.isascii() else len(text.encode())
