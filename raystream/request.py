"""A request that Python code makes, in the terms of the HTTP API."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from pydantic import ValidationError
from ray.serve.context import _get_serve_request_context

from deployments.contract.errors import InvalidRequestError
from serve_app.api.body.strict_body import StrictBody
from serve_app.http.request_id import chosen_id
from serve_app.http.request_record import CURRENT_RECORD, RequestRecord
from serve_app.http.validation_refusal import refusal_of

logger = logging.getLogger("raystream")

BodyT = TypeVar("BodyT", bound=StrictBody)

Messages = str | Sequence[dict[str, Any]]
"""One user's message, or a conversation in OpenAI's shape: each message has `role` and `content`"""

OWN_OPTIONS: Final = {
    "model": "the object that you call says which model answers",
    "stream": "`async for` streams an answer of Model, and `await` waits for all of it",
    "stream_options": "the last delta has the usage",
    "encoding_format": "vectors are arrays of float32",
}
"""Fields of the HTTP API that are no options here, and why."""


AS_NUMBERS: Final = {"encoding_format": "base64"}
"""Lets one request hold more vectors; they are never written as text."""


def fields_of(options: dict[str, Any], **given: Any) -> dict[str, Any]:
    """Return the fields of a request.

    Args:
        options: Those that the caller names.
        **given: The others.

    Raises:
        TypeError: An option is none here, or is given as an argument, too.
    """
    arguments = dict.fromkeys(given, "it is the first argument")
    for name, why in (arguments | OWN_OPTIONS).items():
        if name in options:
            raise TypeError(f"{name} is no option: {why}")
    return {**given, **options}


def conversation(messages: Messages) -> object:
    """Return the messages of a conversation; a string is one user's message."""
    is_text = isinstance(messages, str)
    return [{"role": "user", "content": messages}] if is_text else listed(messages)


def listed(value: object) -> object:
    """Return a tuple as a list, since bodies take only JSON's types, and anything else as it is."""
    return list(value) if isinstance(value, tuple) else value


def read_body(kind: type[BodyT], fields: dict[str, Any]) -> BodyT:
    """Return a request of the HTTP API.

    Raises:
        InvalidRequestError: A field is unknown or wrong, in the words of the HTTP API, or no body
            could hold it.
    """
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise refusal_of(error.errors(), fields) from None
    try:
        # A schema may hold anything, and a text half of a surrogate pair.
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"The request can't be written as JSON: {error}") from None
    return body


@contextmanager
def working(record: RequestRecord | None = None) -> Iterator[RequestRecord]:
    """Work for a request, as its time limits and its moves between replicas see it.

    Args:
        record: The request; None begins one. In a Serve deployment it has the id of the request
            that the deployment answers, so that log lines of both can be found together.
    """
    if record is None:
        request_id = chosen_id(_get_serve_request_context().request_id)
        record = RequestRecord(request_id, "", time.monotonic, time.monotonic())
    token = CURRENT_RECORD.set(record)
    try:
        yield record
    finally:
        CURRENT_RECORD.reset(token)


def log_warnings(record: RequestRecord) -> None:
    """Log what was asked for and is not done; over HTTP, a header says so."""
    for warning in record.warnings:
        logger.warning("%s", warning)
