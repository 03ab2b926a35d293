"""Finds the text in an event's JSON by a JMESPath; jmespath comes with the extra `bench`."""

from typing import Any

import jmespath
from jmespath.exceptions import JMESPathError

from loadtest.client.contract import MalformedAnswerError


class TextPath:
    """A compiled path."""

    def __init__(self, written: str) -> None:
        """Compile the path.

        Args:
            written: The path as `--text-path` has it.

        Raises:
            ValueError: It is not a JMESPath.
        """
        try:
            self._path = jmespath.compile(written)
        except JMESPathError as error:
            raise ValueError(f"--text-path {written!r} is not a JMESPath: {error}") from None

    def text_in(self, payload: Any) -> str:
        """Return the text in parsed JSON; "" if there is none.

        Raises:
            MalformedAnswerError: The path can't be followed in this JSON.
        """
        try:
            text = self._path.search(payload)
        except JMESPathError as error:
            raise MalformedAnswerError(f"--text-path fails on the answer: {error}") from None
        return text if isinstance(text, str) else "" if text is None else str(text)
