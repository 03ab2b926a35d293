"""A route whose body is JSON as the standard has it, and whose answer is a model or a response.

FastAPI reads bodies with Python's decoder, which takes NaN and Infinity, lets the last of two equal
keys win, and makes one message of all that can go wrong. Here each has its own. Nor does a route
need what FastAPI does besides for every request: it has no dependencies but the body and the
request, and its answer, which our own code has made, is not validated once more.

Source: https://www.rfc-editor.org/rfc/rfc8259
"""

import json
import re
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

from deployments.errors import InvalidRequestError, UnsupportedMediaTypeError

MAX_NUM_VALUES: Final = 2**21
"""Values in one body, twice as many as the longest list of token ids: each takes some 60 bytes."""

MAX_NUM_NODES: Final = 2**17
"""Objects, lists and fields in one body, several times what the largest conversation has. Each
takes a microsecond or two, while everybody's streams wait; token ids take a tenth of that."""

MAX_INTEGRAL: Final = 2.0**63
"""Larger numbers stay floats: as an integer, 1e300 has three hundred digits, which take long."""

# Up to the next bracket or colon that stands in no text; the last one may find none.
_NODE: Final = re.compile(rb'(?:[^"\[{:]++|"(?:[^"\\]++|\\.)*+"?)*+[\[{:]?', re.DOTALL)


class JsonRoute(APIRoute):
    """A route with one body, which is read strictly."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Describe the route to FastAPI, and answer its requests without it."""
        super().__init__(path, endpoint, **options)
        self.app = request_response(self.answer)

    async def answer(self, request: Request) -> Response:
        """Return the endpoint's answer.

        Raises:
            UnsupportedMediaTypeError: The body is said to be no JSON, or compressed.
            InvalidRequestError: It is not JSON.
            RequestValidationError: It is not what the endpoint takes.
        """
        _require_json(request.headers)
        max_depth: int = request.app.state.limits.max_json_depth
        decoded = decode_json(await request.body(), max_depth)
        assert self.body_field is not None, "a route without a body needs no JsonRoute"
        body, mistakes = self.body_field.validate(decoded, loc=("body",))
        if mistakes:
            raise RequestValidationError(mistakes, body=decoded)
        given = {self.body_field.name: body}
        if self.dependant.request_param_name is not None:
            given[self.dependant.request_param_name] = request
        answer: Response | BaseModel = await self.endpoint(**given)
        if isinstance(answer, BaseModel):
            return Response(answer.model_dump_json(), media_type="application/json")
        return answer


def decode_json(body: bytes, max_depth: int) -> Any:
    """Return the decoded body.

    Args:
        body: What came.
        max_depth: Objects and lists inside one another.

    Raises:
        InvalidRequestError: It is not JSON, it is nested too deeply or holds too many values, or
            numbers or text that can't be passed on.
    """
    num_brackets = body.count(b"{") + body.count(b"[")
    _check_size(body, num_brackets)
    try:
        decoded = json.loads(
            body.decode(),
            parse_constant=_refuse_number,
            parse_float=_number,
            object_pairs_hook=_object,
        )
        # An escaped half of a surrogate pair decodes, but is no text.
        if b"\\ud" in body.lower():
            json.dumps(decoded, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequestError(f"The body is not JSON: {error.msg}, {where}.") from None
    except RecursionError:
        raise _too_deep(max_depth) from None
    except UnicodeError:
        raise InvalidRequestError("The body is not Unicode text in UTF-8.") from None
    except ValueError:
        raise InvalidRequestError("The body holds a number that is too long.") from None
    # So few brackets can't nest too deeply, and most bodies have no more.
    if num_brackets > max_depth:
        _check_depth(decoded, max_depth)
    return decoded


def _check_size(body: bytes, num_brackets: int) -> None:
    # Commas in texts count too; no prompt has room for so many.
    if num_brackets + body.count(b",") > MAX_NUM_VALUES:
        raise InvalidRequestError(f"The body holds more than {MAX_NUM_VALUES} values.")
    # A prompt does have room for more brackets and colons than this, so they are told apart.
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
        raise InvalidRequestError(f"The key {twice[:64]!r} stands twice in one object.")
    return fields


def _refuse_number(name: str) -> NoReturn:
    raise InvalidRequestError(f"{name} is not a number in JSON.")


def _number(digits: str) -> float:
    """Return a number: to JSON, and to its schemas, 2.0 and 2e0 are the integer 2."""
    number = float(digits)
    if not isfinite(number):
        _refuse_number(digits[:32])
    return int(number) if number.is_integer() and abs(number) < MAX_INTEGRAL else number
