"""What of a configuration may be written down: not the values of headers, nor keys in a URL."""

import re
from collections.abc import Sequence
from typing import Final

from yarl import URL

HIDDEN: Final = "***"

_SECRET_NAME: Final = re.compile(r"key|token|secret|password|auth|sig", re.IGNORECASE)


def redacted_headers(headers: Sequence[str]) -> list[str]:
    """Return `Name: ***` for each header."""
    return [f"{header.partition(':')[0].strip()}: {HIDDEN}" for header in headers]


def redacted_url(url: str) -> str:
    """Return a URL without its user, its password, and what its query calls a secret."""
    parsed = URL(url)
    query = [
        (name, HIDDEN if _SECRET_NAME.search(name) else value)
        for name, value in parsed.query.items()
    ]
    hidden = parsed.with_user(None)
    return str(hidden.with_query(query)) if query else str(hidden)


def secrets_of_url(url: str) -> list[str]:
    """Return what `redacted_url` leaves out."""
    parsed = URL(url)
    hidden = [value for name, value in parsed.query.items() if _SECRET_NAME.search(name)]
    return [secret for secret in (parsed.user, parsed.password, *hidden) if secret]
