"""HAProxy's own answers when no replica of the ingress answers, as errors in our JSON.

In Ray's configuration all of them are a 500 in plain text. A client then can't tell a server that
is starting or replaces a replica, where a retry makes sense, from one with a bug.

HAProxy refuses what is not HTTP, or has too many headers, before its configuration applies. That
400 stays HTML.

Source: `http-error` in https://docs.haproxy.org/2.8/configuration.html#4.2-http-error
"""

import json
import re
from typing import Final

ERRORFILE: Final = re.compile(
    r"^(?P<indent>[ \t]+)errorfile (?P<status>502|503|504) .*$", re.MULTILINE
)

RETRY_AFTER_S: Final = 1

MESSAGES: Final = {
    502: "The replica that worked on this request has gone. Send the request again.",
    503: "No replica of the server is ready yet. Send the request again in a moment.",
    504: "The server has not answered in time. Send the request again.",
}


def with_json_errors(configuration: str) -> str:
    """Return HAProxy's configuration with our errors in place of Ray's error file."""
    return ERRORFILE.sub(_http_error, configuration)


def error_body(status: int) -> str:
    """Return the JSON of one of HAProxy's errors; `http.errors` has the shape."""
    code = "replica_unavailable"
    message = MESSAGES[status]
    return json.dumps(
        {"error": {"message": message, "type": "server_error", "param": None, "code": code}}
    )


def _http_error(found: re.Match[str]) -> str:
    # In single quotes HAProxy takes all characters but these as they are; no message has one.
    body = error_body(int(found["status"]))
    return (
        f"{found['indent']}http-error status {found['status']} content-type application/json "
        f"string '{body}' hdr Retry-After {RETRY_AFTER_S}"
    )
