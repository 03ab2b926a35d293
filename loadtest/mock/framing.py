"""The bytes of the mock's events, in every form that the standard allows."""

import json
from collections.abc import Mapping
from typing import Any

from loadtest.mock.script import Framing

DONE = "[DONE]"


def framed(payload: Mapping[str, Any] | str, framing: Framing) -> bytes:
    """Return an event's bytes; a text stands for itself."""
    if isinstance(payload, str):
        data = payload
    else:
        data = json.dumps(payload, indent=1 if framing is Framing.MULTILINE else None)
    lines = [f"data: {line}" for line in data.split("\n")]
    if framing is Framing.COMMENTS:
        lines = [": ping", "", "id: 1", "retry: 1000", "event: message", *lines]
    line_end = {Framing.CRLF: "\r\n", Framing.CR: "\r"}.get(framing, "\n")
    return "".join(line + line_end for line in [*lines, ""]).encode()
