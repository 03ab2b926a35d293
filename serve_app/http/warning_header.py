"""The header of an answer that does not hold all that its request asked for.

The standard's header `Warning` is obsolete, so this one has a name of its own.

Source: https://www.rfc-editor.org/rfc/rfc9111#section-5.5
"""

from collections.abc import Mapping
from typing import Final

from serve_app.http.request_record import current_record

WARNING_HEADER: Final = "X-Raystream-Warning"
MAX_LENGTH: Final = 512
"""Characters of the header's value; proxies bound all headers of an answer together."""


def warning_headers() -> Mapping[str, str]:
    """Return the header for the current request, or nothing if there is nothing to say."""
    record = current_record()
    if record is None or not record.warnings:
        return {}
    return {WARNING_HEADER: header_value("; ".join(record.warnings))}


def header_value(text: str) -> str:
    """Return a text that any header may hold: printable ASCII, cut if it is long.

    Warnings may repeat words of a client, such as a format's name, and line ends would add headers.
    """
    printable = "".join(each if " " <= each <= "~" else "?" for each in text[: MAX_LENGTH + 1])
    is_cut = len(text) > MAX_LENGTH
    return f"{printable[: MAX_LENGTH - 3]}..." if is_cut else printable
