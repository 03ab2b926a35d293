"""Removes secrets from a configuration: header values, and keys in a URL or a body."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from yarl import URL

HIDDEN: Final = "***"

_SECRET_NAME: Final = re.compile(r"key|token|secret|password|auth|sig", re.IGNORECASE)


def redacted_headers(headers: Sequence[str]) -> list[str]:
    """Return `Name: ***` for each header."""
    return [f"{header.partition(':')[0].strip()}: {HIDDEN}" for header in headers]


def redacted_url(url: str) -> str:
    """Return a URL without its user, its password, and the secrets in its query."""
    parsed = URL(url)
    query = [
        (name, HIDDEN if _SECRET_NAME.search(name) else value)
        for name, value in parsed.query.items()
    ]
    hidden = parsed.with_user(None)
    return str(hidden.with_query(query)) if query else str(hidden)


def secrets_of_url(url: str) -> list[str]:
    """Return the secrets that `redacted_url` hides."""
    parsed = URL(url)
    hidden = [value for name, value in parsed.query.items() if _SECRET_NAME.search(name)]
    return [secret for secret in (parsed.user, parsed.password, *hidden) if secret]


def redacted_body(body: Any) -> Any:
    """Return a body with its secret texts hidden; a number such as `max_tokens` is not one."""
    if isinstance(body, dict):
        return {
            name: HIDDEN if _is_secret(name, value) else redacted_body(value)
            for name, value in body.items()
        }
    return [redacted_body(each) for each in body] if isinstance(body, list) else body


def secrets_of_body(body: Any) -> Iterator[str]:
    """Yield the secrets that `redacted_body` hides."""
    if isinstance(body, dict):
        for name, value in body.items():
            if _is_secret(name, value):
                yield value
            else:
                yield from secrets_of_body(value)
    elif isinstance(body, list):
        for each in body:
            yield from secrets_of_body(each)


def _is_secret(name: str, value: Any) -> bool:
    """Return whether the name marks the text as a secret; a template's placeholder is not one."""
    is_text = isinstance(value, str) and not value.startswith("{")
    return is_text and _SECRET_NAME.search(name) is not None
