"""A function that fails, for the place of one that a test breaks."""

from collections.abc import Callable
from typing import NoReturn


def failing(error: BaseException) -> Callable[..., NoReturn]:
    """Return a function that raises this error, whatever it is called with."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail
