"""A route whose body is standard JSON, and whose answer is a model or a response.

The body is read here, within the limits on its size and its time. No other route reads one.

FastAPI reads bodies with Python's decoder. That decoder accepts NaN and Infinity, keeps the last of
two equal keys, and has one message for every mistake. Here each mistake has its own message. The
route also skips work that FastAPI does for every request: there are no dependencies besides the
body and the request, and the answer is not validated again, since our own code made it.

Source: https://www.rfc-editor.org/rfc/rfc8259
"""

import asyncio
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import islice
from math import isfinite
from typing import Any, Final, NoReturn

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.routing import request_response

from deployments.contract.errors import (
    InvalidRequestError,
    RequestTimeoutError,
    RequestTooLargeError,
    UnsupportedMediaTypeError,
)
from serve_app.config import LimitsConfig
from serve_app.http.warning_header import warning_headers

MAX_NUM_VALUES: Final = 2**21
"""Values in one body, twice the longest list of token ids. Each takes some 60 bytes of memory."""

MAX_NUM_NODES: Final = 2**17
"""Objects, lists and fields in one body, several times as many as the largest conversation has.
Each takes a microsecond or two, during which all streams wait; token ids take a tenth of that."""

MAX_INTEGRAL: Final = 2.0**63
"""Larger numbers stay floats: as an integer, 1e300 has three hundred digits, which are slow."""

MAX_CONTEXT: Final = 32
"""Characters of the body that an error quotes, so that its place can be found."""

# Matches up to the next bracket or colon outside strings; the last match may hold none.
_NODE: Final = re.compile(rb'(?:[^"\[{:]++|"(?:[^"\\]++|\\.)*+"?)*+[\[{:]?', re.DOTALL)


class JsonRoute(APIRoute):
    """A route with one body, which is decoded strictly."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Register the route with FastAPI, but answer its requests with `answer`."""
        super().__init__(path, endpoint, **options)
        self.app = request_response(self.answer)

    async def answer(self, request: Request) -> Response:
        """Return the endpoint's answer.

        Raises:
            UnsupportedMediaTypeError: The headers don't declare JSON, or declare compression.
            RequestTooLargeError: The body is too large.
            RequestTimeoutError: The body took too long.
            InvalidRequestError: The body is not JSON.
            RequestValidationError: The body does not fit the endpoint's model.
        """
        _require_json(request.headers)
        limits: LimitsConfig = request.app.state.limits
        decoded = decode_json(await read_body(request, limits), limits.max_json_depth)
        assert self.body_field is not None, "a route without a body needs no JsonRoute"
        body, mistakes = self.body_field.validate(decoded, loc=())
        if mistakes:
            raise RequestValidationError(mistakes, body=decoded)
        given = {self.body_field.name: body}
        if self.dependant.request_param_name is not None:
            given[self.dependant.request_param_name] = request
        answer: Response | BaseModel = await self.endpoint(**given)
        if isinstance(answer, BaseModel):
            answer = Response(answer.model_dump_json(), media_type="application/json")
        answer.headers.update(warning_headers())
        return answer


async def read_body(request: Request, limits: LimitsConfig) -> bytes:
    """Return the request's body.

    Raises:
        RequestTooLargeError: It is larger than `max_body_bytes`.
        RequestTimeoutError: It did not come within `max_body_read_s`.
        ClientDisconnect: The client has left before it had sent all.
    """
    pieces, num_bytes = list[bytes](), 0
    try:
        async with asyncio.timeout(limits.max_body_read_s):
            async for piece in request.stream():
                num_bytes += len(piece)
                if num_bytes > limits.max_body_bytes:
                    raise too_large(limits)
                pieces.append(piece)
    except TimeoutError:
        raise RequestTimeoutError(
            f"The body did not come within {limits.max_body_read_s:g} s (limits.max_body_read_s)."
        ) from None
    return b"".join(pieces)


def too_large(limits: LimitsConfig) -> RequestTooLargeError:
    """Return the refusal of a body that is larger than is read."""
    return RequestTooLargeError(
        f"The body is larger than {limits.max_body_bytes} bytes, the most that is read "
        "(limits.max_body_bytes)."
    )


def file_too_large(max_file_bytes: int) -> RequestTooLargeError:
    """Return the refusal of a file that is larger than is kept."""
    return RequestTooLargeError(
        f"The file is larger than {max_file_bytes} bytes, the most that is kept "
        "(jobs.max_file_bytes)."
    )


def decode_json(body: bytes, max_depth: int) -> Any:
    """Return the decoded body.

    Args:
        body: The body's bytes.
        max_depth: How deeply objects and lists may be nested.

    Raises:
        InvalidRequestError: The body is not JSON, is nested too deeply, holds too many values, or
            holds numbers or text that can't be passed on.
    """
    if not body or body.isspace():
        raise InvalidRequestError("The body is empty; send a JSON object.")
    num_brackets = body.count(b"{") + body.count(b"[")
    _check_size(body, num_brackets)
    try:
        decoded = json.loads(
            body.decode(),
            parse_constant=_refuse_number,
            parse_float=_number,
            object_pairs_hook=_object,
        )
        # Half of a surrogate pair, escaped, decodes but can't be encoded as UTF-8.
        if b"\\ud" in body.lower():
            json.dumps(decoded, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequestError(f"The body is not JSON: {error.msg}, {where}.") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The body is not text in UTF-8: byte {error.start} is 0x{body[error.start]:02x}."
        ) from None
    except UnicodeEncodeError as error:
        raise _half_a_pair(error) from None
    except ValueError:
        raise InvalidRequestError(
            f"The body holds a whole number of more than {sys.get_int_max_str_digits()} digits."
        ) from None
    # With no more brackets than this, as in most bodies, nesting can't be too deep.
    if num_brackets > max_depth:
        _check_depth(decoded, max_depth)
    return decoded


def _check_size(body: bytes, num_brackets: int) -> None:
    # Commas in strings count too, but no prompt has room for that many.
    if num_brackets + body.count(b",") > MAX_NUM_VALUES:
        raise InvalidRequestError(f"The body holds more than {MAX_NUM_VALUES} values.")
    # A prompt has room for more brackets and colons than this, so those in strings don't count.
    if num_brackets + body.count(b":") > MAX_NUM_NODES and _has_too_many_nodes(body):
        raise InvalidRequestError(
            f"The body holds more than {MAX_NUM_NODES} objects, lists and fields."
        )


def _has_too_many_nodes(body: bytes) -> bool:
    nodes = (found for found in _NODE.finditer(body) if found[0][-1:] in (b"[", b"{", b":"))
    return next(islice(nodes, MAX_NUM_NODES, None), None) is not None


def _check_depth(decoded: Any, max_depth: int) -> None:
    level = [decoded]
    for _ in range(max_depth):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value)
            if isinstance(child, dict | list)
        ]
        if not level:
            return
    raise _too_deep(max_depth)


def _half_a_pair(error: UnicodeEncodeError) -> InvalidRequestError:
    """Return the refusal of an escape that stands for half a character."""
    before = error.object[max(0, error.start - MAX_CONTEXT) : error.start]
    escape = f"\\u{ord(error.object[error.start]):04x}"
    return InvalidRequestError(
        f"The body holds {escape}, half of a surrogate pair, which is no character by itself: "
        f"after {before!r}. Send both halves of the pair, or leave it out."
    )


def _too_deep(max_depth: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"The body's JSON is nested too deeply: more than {max_depth} levels "
        "(limits.max_json_depth)."
    )


def _require_json(headers: Headers) -> None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaTypeError("Send JSON with 'Content-Type: application/json'.")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaTypeError("Send the body as it is, without 'Content-Encoding'.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(key for key, number in Counter(key for key, _ in pairs).items() if number > 1)
        raise InvalidRequestError(f"The key {twice[:64]!r} appears twice in one object.")
    return fields


def _refuse_number(name: str) -> NoReturn:
    raise InvalidRequestError(f"{name} is not a number in JSON. Send a number, or null.")


def _number(digits: str) -> float:
    """Return a number. In JSON and its schemas, 2.0 and 2e0 are the integer 2."""
    number = float(digits)
    if not isfinite(number):
        most = f"{sys.float_info.max:.2g}"
        raise InvalidRequestError(
            f"The number {digits[:MAX_CONTEXT]} is out of range: numbers are from -{most} to "
            f"{most}."
        )
    return int(number) if number.is_integer() and abs(number) < MAX_INTEGRAL else number
