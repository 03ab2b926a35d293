"""Turns pydantic's errors about a body into one refusal in plain words, with the field's path.

pydantic's own messages are about Python: "Input should be a valid dictionary or object to extract
fields from". They also leave out the field, which many clients don't show beside the message.
"""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from deployments.contract.errors import InvalidRequestError

MAX_ECHO: Final = 256
"""Most characters of a message and of a parameter's path, since both may quote the client."""

CODES: Final = ("unknown_parameter", "unsupported_parameter", "invalid_combination")
"""Error types of our own, which serve as codes; their messages name the field."""

PREDICATES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bool_type": "be true or false",
        "dict_type": "be an object",
        "finite_number": "be a finite number",
        "float_type": "be a number",
        "greater_than": "be more than {gt}",
        "greater_than_equal": "be at least {ge}",
        "int_from_float": "be a whole number",
        "int_parsing": "be a whole number",
        "int_parsing_size": "be a smaller number",
        "int_type": "be a whole number",
        "less_than": "be less than {lt}",
        "less_than_equal": "be at most {le}",
        "list_type": "be a list",
        "literal_error": "be {expected}",
        "model_attributes_type": "be an object",
        "model_type": "be an object",
        "object_or_string": "be an object or a string",
        "string_pattern_mismatch": "fit the pattern {pattern}",
        "string_too_long": "have at most {max_length} characters",
        "string_too_short": "have at least {min_length} characters",
        "string_type": "be a string",
        "too_long": "hold at most {max_length} entries",
        "too_short": "hold at least {min_length} entries",
        "union_tag_invalid": "be {expected_tags}",
        "wrong_type": "be {expected}",
    }
)
"""What a value must do, by the type of pydantic's error. A test sends every wrong type to every
field, so that no type is missing."""

MISSING: Final = ("missing", "union_tag_not_found")


def refusal_of(
    errors: Sequence[Mapping[str, Any]], validated: Any, place: str = ""
) -> InvalidRequestError:
    """Return the refusal for pydantic's errors: for the first, and others about the same value.

    Args:
        errors: At least one. A union gives one for each of its types.
        validated: What was validated.
        place: The path of the field that held it; empty if it was the whole body.
    """
    first = errors[0]
    path = _path(first, validated, place)
    field = first.get("ctx", {}).get("field")
    if first["type"] in PREDICATES:
        together = (_predicate(error) for error in errors if _path(error, validated, place) == path)
        message = f"{path or 'The body'} must {_joined(list(dict.fromkeys(together)))}."
    elif first["type"] in MISSING:
        message = f"{path} is missing."
    elif first["type"] in CODES:
        # The message has the field's name; here it gets the whole path.
        message = str(first["msg"]).replace(str(field), path, 1)
    else:
        message = first["msg"]
    refusal = InvalidRequestError(message[:MAX_ECHO], path or None)
    if first["type"] in CODES:
        refusal.code = first["type"]
    return refusal


def with_place(message: str, param: str | None) -> str:
    """Return a message that names its parameter: many clients show it without `param`."""
    if param is None or re.search(rf"(?<![\w.]){re.escape(param)}(?!\w)", message):
        return message
    return f"{param}: {message}"


def _predicate(error: Mapping[str, Any]) -> str:
    context = error.get("ctx", {})
    if context.get("min_length") == 1:
        return "not be empty"
    if error["type"] == "float_type" and _is_integer(error["input"]):
        return "be a smaller number"
    known = PREDICATES.get(error["type"])
    return error["msg"] if known is None else _in_words(known.format(**context))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _in_words(predicate: str) -> str:
    """Return a predicate with "or" before the last of several quoted values, and JSON's true."""
    return re.sub(r"', ('[^']*')$", r"' or \1", re.sub(r" True$", " true", predicate))


def _joined(predicates: Sequence[str]) -> str:
    first, *others = predicates
    return " or ".join([first, *(other.removeprefix("be ") for other in others)])


def _path(error: Mapping[str, Any], validated: Any, place: str) -> str:
    """Return the path of the parameter, such as `messages[0].content`; empty for the whole body."""
    steps = _steps(error, validated)
    context = error.get("ctx", {})
    last = context.get("discriminator", "").strip("'") or context.get("field")
    steps += [] if last is None else [last]
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return (place + path).removeprefix(".")[:MAX_ECHO]


def _steps(error: Mapping[str, Any], value: Any) -> list[int | str]:
    """Return the steps of pydantic's location that exist in the body.

    The location also names union members, which may have the same names as fields (`text`,
    `image_url`). So the path ends at the value that pydantic rejected, if the body holds it.
    """
    location: Sequence[int | str] = error["loc"]
    steps: list[int | str] = []
    for index, step in enumerate(location):
        if value is error["input"]:
            return [*steps, location[-1]] if error["type"] == "missing" else steps
        if isinstance(value, list) and isinstance(step, int):
            steps.append(step)
            value = value[step]
        elif isinstance(value, dict) and (step in value or index + 1 == len(location)):
            steps.append(step)
            value = value.get(step)
    return steps
