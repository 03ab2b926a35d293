"""The headers of our web pages, `/` and `/docs`: what a page may load and run.

The policy forbids every source but this server, inline scripts and `eval`, so that text of a model
or of a description can't run, whatever a page does with it.
"""

from collections.abc import Mapping
from typing import Final

PAGE_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            # Swagger UI's style sheet embeds its icons as data: URIs, and pictures that a user has
            # chosen are such URIs; an answer of /docs that is a picture is shown from a blob.
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
