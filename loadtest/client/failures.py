"""Which kind of error an exception or a status is: the one place that decides."""

from http import HTTPStatus

import aiohttp
from aiohttp.http_exceptions import ContentLengthError, HttpProcessingError, TransferEncodingError

from loadtest.record import ErrorKind


def kind_of_status(status: int) -> ErrorKind | None:
    """Return the error of an HTTP status; None for a success."""
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return None
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return ErrorKind.HTTP_429
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ErrorKind.HTTP_5XX
    # A redirect is not followed: the answer's time would be that of two requests.
    return ErrorKind.HTTP_4XX if status >= HTTPStatus.BAD_REQUEST else ErrorKind.MALFORMED


def kind_of_exception(error: Exception, *, is_answered: bool) -> ErrorKind:
    """Return the error of what aiohttp raised.

    Args:
        error: What it raised.
        is_answered: Whether the headers had come. Before them a lost connection is no connection,
            after them it cuts the answer off.
    """
    if isinstance(error, aiohttp.ClientPayloadError):
        return _kind_of_broken_body(error)
    if isinstance(error, aiohttp.ClientResponseError):
        return ErrorKind.MALFORMED
    return ErrorKind.TRUNCATED if is_answered else ErrorKind.CONNECT


def _kind_of_broken_body(error: aiohttp.ClientPayloadError) -> ErrorKind:
    """Tell a body that stops too early from one whose framing is wrong."""
    cause = error.__cause__
    is_short = isinstance(cause, ContentLengthError | TransferEncodingError)
    is_wrong = isinstance(cause, HttpProcessingError) and not is_short
    return ErrorKind.MALFORMED if is_wrong else ErrorKind.TRUNCATED
