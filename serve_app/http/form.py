"""Reads the parts of a form that is uploaded (multipart/form-data), piece by piece as they come.

Nothing is kept but the piece at hand, so a file of any size takes no memory, and none lies outside
the folder that its reader writes to.

Source: RFC 7578, RFC 2046 section 5.1
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from typing import Final

from deployments.contract.errors import InvalidRequestError, UnsupportedMediaTypeError

MAX_PART_HEADER_BYTES: Final = 8192
MAX_BOUNDARY_LENGTH: Final = 70
MAX_PADDING: Final = 256
"""Spaces after a boundary, which RFC 2046 allows."""


@dataclass(frozen=True, slots=True)
class Part:
    """The beginning of a part.

    Attributes:
        name: The field's name.
        filename: The client's name for the file; None for a field that is no file.
    """

    name: str
    filename: str | None


class FormReader:
    """Finds the parts in the bytes of a body."""

    def __init__(self, content_type: str) -> None:
        """Read what separates the parts.

        Args:
            content_type: The request's header.

        Raises:
            UnsupportedMediaTypeError: The body is no form.
        """
        boundary = _boundary(content_type)
        if boundary is None:
            raise UnsupportedMediaTypeError(
                "Send a form with 'Content-Type: multipart/form-data' and its boundary."
            )
        self._delimiter = b"\r\n--" + boundary
        # The first delimiter may stand at the very beginning.
        self._buffer = b"\r\n"
        self._find: Callable[[], Iterator[Part | bytes]] = self._preamble

    @property
    def has_ended(self) -> bool:
        """Whether the last part is complete."""
        return self._find == self._epilogue

    def feed(self, piece: bytes) -> Iterator[Part | bytes]:
        """Yield what a piece of the body brings: beginnings of parts, and bytes of their values.

        Raises:
            InvalidRequestError: The body is no form.
        """
        self._buffer += piece
        while True:
            find, size = self._find, len(self._buffer)
            yield from find()
            if self._find == find and len(self._buffer) == size:
                return

    def _preamble(self) -> Iterator[Part | bytes]:
        for _ in self._value():
            pass
        yield from ()

    def _value(self) -> Iterator[Part | bytes]:
        at = self._buffer.find(self._delimiter)
        end = len(self._buffer) - len(self._delimiter) + 1 if at < 0 else at
        if end > 0:
            yield self._buffer[:end]
            self._buffer = self._buffer[end:]
        if at >= 0:
            self._buffer = self._buffer[len(self._delimiter) :]
            self._find = self._after_delimiter

    def _after_delimiter(self) -> Iterator[Part | bytes]:
        rest = self._buffer.lstrip(b" \t")
        if rest.startswith(b"--"):
            self._find = self._epilogue
        elif rest.startswith(b"\r\n"):
            self._buffer = rest
            self._find = self._headers
        elif len(rest) > 1 or len(self._buffer) > MAX_PADDING:
            raise InvalidRequestError("The form is broken: a boundary is followed by other text.")
        yield from ()

    def _headers(self) -> Iterator[Part | bytes]:
        # They begin behind the end of the delimiter's line, which may also end an empty list.
        at = self._buffer.find(b"\r\n\r\n")
        if at < 0:
            if len(self._buffer) > MAX_PART_HEADER_BYTES:
                raise InvalidRequestError("The form is broken: the headers of a part are too long.")
            return
        text = self._buffer[2 : at + 4].decode("utf-8", "replace")
        headers = HeaderParser().parsestr(text)
        self._buffer = self._buffer[at + 4 :]
        self._find = self._value
        yield _part(headers)

    def _epilogue(self) -> Iterator[Part | bytes]:
        self._buffer = b""
        yield from ()


def _boundary(content_type: str) -> bytes | None:
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_boundary()
    if header.get_content_type() != "multipart/form-data" or not boundary:
        return None
    if len(boundary) > MAX_BOUNDARY_LENGTH or not boundary.isascii():
        return None
    return boundary.encode()


def _part(headers: Message) -> Part:
    """Return what the headers of a part say.

    Raises:
        InvalidRequestError: They name no field.
    """
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str):
        raise InvalidRequestError("The form is broken: a part has no name.")
    try:
        filename = headers.get_filename()
    except UnicodeError:
        raise InvalidRequestError("The form is broken: a filename can't be decoded.") from None
    return Part(_encodable(name), None if filename is None else _encodable(filename))


def _encodable(text: str) -> str:
    """Return a text without lone surrogates, which some charsets that a client may name have."""
    return text.encode(errors="replace").decode()
