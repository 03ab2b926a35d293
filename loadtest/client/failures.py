"""Maps exceptions, HTTP statuses and timeouts to kinds of error."""

from http import HTTPStatus

import aiohttp
from aiohttp.http_exceptions import ContentLengthError, HttpProcessingError, TransferEncodingError

from loadtest.client.watchdog import TimeLimits
from loadtest.results.record import ErrorKind


def kind_of_status(status: int) -> ErrorKind | None:
    """Return the kind of error of an HTTP status; None for a success."""
    if HTTPStatus.OK <= status < HTTPStatus.MULTIPLE_CHOICES:
        return None
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return ErrorKind.HTTP_429
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return ErrorKind.HTTP_5XX
    # Redirects are not followed, since that would time two requests.
    return ErrorKind.HTTP_4XX if status >= HTTPStatus.BAD_REQUEST else ErrorKind.MALFORMED


def kind_of_exception(error: Exception, *, is_answered: bool) -> ErrorKind:
    """Return the kind of error of an exception from aiohttp.

    Args:
        error: The exception.
        is_answered: Whether the response headers have arrived. A connection lost before them is a
            connection error; after them, the answer is truncated.
    """
    if isinstance(error, aiohttp.ClientPayloadError):
        return _kind_of_broken_body(error)
    if isinstance(error, aiohttp.ClientResponseError):
        return ErrorKind.MALFORMED
    return ErrorKind.TRUNCATED if is_answered else ErrorKind.CONNECT


def _kind_of_broken_body(error: aiohttp.ClientPayloadError) -> ErrorKind:
    """Distinguish a body that stops too early from one with wrong framing."""
    cause = error.__cause__
    is_short = isinstance(cause, ContentLengthError | TransferEncodingError)
    is_wrong = isinstance(cause, HttpProcessingError) and not is_short
    return ErrorKind.MALFORMED if is_wrong else ErrorKind.TRUNCATED


def timeout_message(kind: ErrorKind, limits: TimeLimits) -> str:
    """Say which time limit was exceeded."""
    match kind:
        case ErrorKind.TIMEOUT_FIRST:
            return f"no content within {limits.first_token_s:g} s"
        case ErrorKind.TIMEOUT_STALL:
            return f"no further content for {limits.stall_s:g} s"
        case ErrorKind.TIMEOUT_TOTAL:
            return f"not complete within {limits.total_s:g} s"
        case _:
            return "the operating system gave up connecting"
