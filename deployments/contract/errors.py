"""The error tree. Each class carries the HTTP status, OpenAI's error type and a code.

The classes cross process borders, so each passes all its arguments positionally to
`Exception.__init__`. `serve_app.http.errors` is the one place that turns them into HTTP.
"""

from enum import StrEnum
from typing import Final


class RaystreamError(Exception):
    """An error that is reported to the client.

    Attributes:
        retry_after_s: Seconds until a retry may succeed, if that is known.
    """

    status = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """Store the details for the client.

        Args:
            message: What is wrong and how to mend it.
            param: The request's field that causes the error, if there is one.
            retry_after_s: Seconds until a retry may succeed, if that is known.
        """
        super().__init__(message, param, retry_after_s)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        """Return only the message."""
        return self.message


class InvalidRequestError(RaystreamError):
    """The request can't be served as it is; the message says how to mend it."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class RequestTooLargeError(InvalidRequestError):
    """The request's body is larger than the server accepts."""

    status = 413
    code = "request_too_large"


class HeadersTooLargeError(InvalidRequestError):
    """The request's headers are larger than the server accepts."""

    status = 431
    code = "headers_too_large"


class RequestTimeoutError(InvalidRequestError):
    """The client took too long to send its body."""

    status = 408
    code = "request_timeout"


class InvalidApiKeyError(InvalidRequestError):
    """The request has no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class MissingScopeError(RaystreamError):
    """The API key, or a request without one, may not use the route."""

    status = 403
    type = "permission_error"
    code = "missing_scope"


class ForeignOriginError(RaystreamError):
    """A web page of another origin asks for what only the server's own may."""

    status = 403
    type = "permission_error"
    code = "foreign_origin"


class ForeignHostError(RaystreamError):
    """A server without keys is asked by a name that a web page may have pointed at it."""

    status = 403
    type = "permission_error"
    code = "foreign_host"


class UpgradeRequiredError(InvalidRequestError):
    """The route speaks WebSocket, which was not asked for; or WebSocket is not spoken there."""

    status = 426
    code = "upgrade_required"


class RateLimitError(RaystreamError):
    """The API key has used up its rate limit."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class UnsupportedMediaTypeError(InvalidRequestError):
    """The request's body is not declared to be JSON, or is compressed."""

    status = 415
    code = "unsupported_media_type"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and answer exceed the model's length."""

    code = "context_length_exceeded"


class InvalidImageError(InvalidRequestError):
    """An image can't be read. The message never repeats the decoder's words."""

    code = "invalid_image"


class SocketAgeError(InvalidRequestError):
    """A WebSocket has been open for as long as it may."""

    code = "websocket_connection_limit_reached"


class ModelNotFoundError(InvalidRequestError):
    """No model of this name is served."""

    status = 404
    code = "model_not_found"


class ModelConflictError(InvalidRequestError):
    """The state or the configuration of the model does not allow this."""

    status = 409
    code = "model_conflict"


class WrongTaskError(InvalidRequestError):
    """The model serves another task than the request asks for."""

    code = "wrong_task"


class JobsDisabledError(RaystreamError):
    """The server keeps no files, batches and responses."""

    status = 403
    type = "permission_error"
    code = "jobs_disabled"


class JobNotFoundError(InvalidRequestError):
    """The API key has no file, batch or response of this id."""

    status = 404
    code = "not_found"


class PreviousResponseError(InvalidRequestError):
    """The response that a request continues is not kept."""

    code = "previous_response_not_found"


class JobLimitError(RaystreamError):
    """The API key has as many files, batches or responses as it may, or as large ones."""

    status = 403
    type = "permission_error"
    code = "job_limit_reached"


class JobConflictError(InvalidRequestError):
    """The state of the file, batch or response does not allow this."""

    status = 409
    code = "conflict"


class JobsUnavailableError(RaystreamError):
    """The store of files, batches and responses can't be read or written."""

    status = 503
    code = "jobs_unavailable"


class OverloadReason(StrEnum):
    """The limit that a refused request would exceed: a setting's name, but for the last two."""

    REQUESTS = "max_queued_requests"
    TOKENS = "max_queued_tokens"
    PARKED = "max_parked"
    IMAGES = "images"
    """What the replica's requests hold of images fills the part of the host's memory for them."""
    LOADING = "loading"
    """Too many requests wait for the model's first replica."""


class OverloadedError(RaystreamError):
    """Too many requests are queued; the client may retry later.

    Attributes:
        reason: Which limit is reached.
    """

    status = 503
    type = "overloaded_error"
    code = "overloaded"

    def __init__(
        self,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        reason: OverloadReason = OverloadReason.REQUESTS,
    ) -> None:
        """Store the details; see `RaystreamError`."""
        super().__init__(message, param, retry_after_s)
        self.args = (message, param, retry_after_s, reason)  # what a copy is made from
        self.reason = reason


REFUSALS: Final = (InvalidRequestError, OverloadedError)
"""What a replica's parts raise where nothing of ours has failed; it is answered with `Refused`."""


def overload_reason(error: RaystreamError) -> OverloadReason | None:
    """Return which limit an error tells of; None if it tells of no overload."""
    return error.reason if isinstance(error, OverloadedError) else None


class RateLimitsUnavailableError(RaystreamError):
    """The API key's usage can't be read, so its rate limit can't be checked."""

    status = 503
    code = "rate_limits_unavailable"


class ReplicaUnavailableError(RaystreamError):
    """The model's replica died or can't be reached."""

    status = 503
    code = "replica_unavailable"


class ModelChangedError(RaystreamError):
    """Only other versions of the model run than the one that began the answer."""

    status = 503
    code = "model_changed"


class AnswerChangedError(RaystreamError):
    """A stream can't be resumed: the answer would be, or has become, another one."""

    status = 409
    type = "invalid_request_error"
    code = "answer_changed"


class GenerationFailedError(RaystreamError):
    """The sequence failed inside the engine; no other sequence was affected."""

    code = "generation_failed"


class PoolingFailedError(RaystreamError):
    """The model failed on a text; no other request was affected."""

    code = "pooling_failed"


class GenerationAbortedError(RaystreamError):
    """The server ended the sequence before its text was finished."""

    status = 503
    code = "generation_aborted"


class DeadlineExceededError(RaystreamError):
    """The answer took longer than the configuration allows; its sequence was aborted."""

    status = 504
    type = "timeout_error"
    code = "timeout"


class FirstTokenTimeoutError(DeadlineExceededError):
    """The first token did not arrive in time."""

    code = "first_token_timeout"


class StallTimeoutError(DeadlineExceededError):
    """The stream stalled: no text arrived for too long after the first."""

    code = "stall_timeout"


class TotalTimeoutError(DeadlineExceededError):
    """The whole answer took too long."""

    code = "total_timeout"
