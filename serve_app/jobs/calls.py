"""What a line of a batch asks a route, the answer, and the line's result in OpenAI's shape."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from deployments.contract.errors import FirstTokenTimeoutError, RaystreamError
from serve_app.http.standing import Standing
from serve_app.jobs.batch import Batch, Result
from serve_app.jobs.batch_input import Line

NO_ROOM: Final = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class Call:
    """A request to one of the server's own routes.

    Attributes:
        path: The route's.
        body: JSON.
        request_id: Names it.
        standing: Whose it is, and how soon it may run.
        key_name: The API key that it is for; None without keys.
    """

    path: str
    body: bytes
    request_id: str
    standing: Standing
    key_name: str | None


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """What a route answered.

    Attributes:
        status: The HTTP status.
        body: JSON.
        code: The code of the error; None if it is none.
        retry_after_s: When it said to come back; None if it did not.
        lost_replicas: Whether replicas were lost while they may have run it.
    """

    status: int
    body: bytes
    code: str | None = None
    retry_after_s: float | None = None
    lost_replicas: bool = False

    @property
    def found_no_room(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in NO_ROOM or self.code == FirstTokenTimeoutError.code


AskRoute = Callable[[Call], Awaitable[CallAnswer]]
StandingOf = Callable[[str], Standing | None]
"""Returns the standing of the owner of a batch; None if there is no such API key any more."""


def answered(batch: Batch, line: Line, request_id: str, answer: CallAnswer) -> Result:
    """Return the result of a line that a route has answered, in OpenAI's shape."""
    custom_id = json.dumps(line.custom_id)
    text = (
        f'{{"id": "batch_req_{batch.key}_{line.number}", "custom_id": {custom_id}, '
        f'"response": {{"status_code": {answer.status}, "request_id": "{request_id}", '
        # It is JSON already, and may be long.
        f'"body": {_in_a_line(answer.body.decode())}}}, "error": null}}'
    )
    return Result(line.number, answer.status != HTTPStatus.OK, text)


def _in_a_line(text: str) -> str:
    """Return JSON without what any reader takes for the end of a line."""
    for mark in ("\u2028", "\u2029", "\x85"):  # only strings can hold them
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text.replace("\n", " ")


def faulty(batch: Batch, line: Line, error: RaystreamError) -> Result:
    """Return the result of a line that no route was asked, in OpenAI's shape."""
    found = {
        "id": f"batch_req_{batch.key}_{line.number}",
        "custom_id": line.custom_id,
        "response": None,
        "error": {
            "code": error.code,
            "message": error.message,
            "param": error.param,
            "line": line.number,
        },
    }
    return Result(line.number, True, json.dumps(found))
