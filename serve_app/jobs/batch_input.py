"""Reads the lines of a batch's file: each is a request, or the error that its client gets."""

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from io import BufferedReader
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from deployments.contract.errors import InvalidRequestError, RequestTooLargeError
from serve_app.config import LimitsConfig
from serve_app.http.json_route import decode_json
from serve_app.http.validation_refusal import refusal_of
from serve_app.jobs.store import Store

READ_BYTES: Final = 2**20
"""About how much is read and checked at a time, on a thread."""


class LineBody(BaseModel):
    """One line of a batch's file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    custom_id: str = Field(min_length=1, max_length=512)
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch.

    Attributes:
        number: Its number in the file, from 1.
        custom_id: The client's name for it; None if it can't be read.
        body: The request's body, as JSON; empty if there is a fault.
        fault: Why it can't be asked.
    """

    number: int
    custom_id: str | None
    body: bytes = b""
    fault: InvalidRequestError | None = None


class BatchInput:
    """The lines of one file, read in order and a few at a time."""

    def __init__(self, store: Store, file: BufferedReader, url: str, limits: LimitsConfig) -> None:
        """Take over an open file.

        Args:
            store: Runs what blocks.
            file: The file; `lines` closes it.
            url: The path that every line must ask.
            limits: Bounds a line as it does a request's body.
        """
        self._store = store
        self._file = file
        self._url = url
        self._limits = limits
        self._number = 0
        self._custom_ids: set[int] = set()

    async def count(self) -> int:
        """Return the number of lines that are not blank.

        Raises:
            JobsUnavailableError: The file can't be read.
        """

        def count() -> int:
            with self._file:
                return sum(text is None or not text.isspace() for text in self._texts())

        return await self._store.on_disk(count)

    async def lines(self) -> AsyncIterator[Line]:
        """Yield the lines that are not blank.

        Raises:
            JobsUnavailableError: The file can't be read.
        """
        texts = self._texts()
        with self._file:
            while some := await self._store.on_disk(lambda: self._some(texts)):
                for line in some:
                    yield line

    def _some(self, texts: Iterator[bytes | None]) -> list[Line]:
        """Return the next lines; none only at the end."""
        some: list[Line] = []
        began = self._file.tell()
        for text in texts:
            self._number += 1
            if text is None or not text.isspace():
                some.append(self._line(text))
            if some and self._file.tell() - began >= READ_BYTES:
                break
        return some

    def _texts(self) -> Iterator[bytes | None]:
        """Yield each line; None in place of one that is too long."""
        most = self._limits.max_body_bytes
        while text := self._file.readline(most + 1):
            if len(text) <= most or text.endswith(b"\n"):
                yield text
                continue
            while (rest := self._file.readline(most)) and not rest.endswith(b"\n"):
                pass
            yield None

    def _line(self, text: bytes | None) -> Line:
        custom_id = None
        try:
            if text is None:
                raise RequestTooLargeError(
                    f"The line is longer than {self._limits.max_body_bytes} bytes, the most that "
                    "is read of a request (limits.max_body_bytes)."
                )
            decoded = decode_json(text, self._limits.max_json_depth)
            if isinstance(decoded, dict) and isinstance(decoded.get("custom_id"), str):
                custom_id = decoded["custom_id"][:512]
            return self._checked(decoded)
        except InvalidRequestError as error:
            return Line(self._number, custom_id, fault=error)

    def _checked(self, decoded: object) -> Line:
        """Return the line.

        Raises:
            InvalidRequestError: It can't be asked.
        """
        try:
            line = LineBody.model_validate(decoded)
        except ValidationError as error:
            raise refusal_of(error.errors(), decoded) from None
        # Hashes: a batch may have many ids, and each may be long.
        if hash(line.custom_id) in self._custom_ids:
            raise InvalidRequestError(
                f"The custom_id {line.custom_id[:64]!r} is that of an earlier line.", "custom_id"
            )
        self._custom_ids.add(hash(line.custom_id))
        if line.url != self._url:
            raise InvalidRequestError(
                f"url must be the batch's endpoint, {self._url}; it is {line.url[:64]!r}.", "url"
            )
        if line.body.get("stream"):
            raise InvalidRequestError(
                "A batch returns whole answers. Leave stream out.", "body.stream"
            )
        return Line(self._number, line.custom_id, to_json(line.body))
