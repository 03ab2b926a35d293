"""The error tree. Each class carries the HTTP status, OpenAI's error type and a code.

The classes cross process borders, so each passes all its arguments positionally to
`Exception.__init__`. `serve_app.api.errors` is the one place that turns them into HTTP.
"""


class RaystreamError(Exception):
    """Something went wrong that the client is told about."""

    status = 500
    type = "server_error"
    code: str | None = "internal_error"
    retry_after_s: int | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        """Keep the message for people and the parameter's name, if one is to blame."""
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        """Return the message alone."""
        return self.message


class InvalidRequestError(RaystreamError):
    """The request can't be served as it stands; the message says how to mend it."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class RequestTooLargeError(InvalidRequestError):
    """The request's body is larger than the server reads."""

    status = 413
    code = "request_too_large"


class UnsupportedMediaTypeError(InvalidRequestError):
    """The request's body is not declared to be JSON."""

    status = 415
    code = "unsupported_media_type"


class ContextLengthExceededError(InvalidRequestError):
    """Prompt and answer don't fit into the model's length."""

    code = "context_length_exceeded"


class InvalidImageError(InvalidRequestError):
    """An image can't be read. The message never repeats what the decoder said."""

    code = "invalid_image"


class ModelNotFoundError(InvalidRequestError):
    """No model of that name is served."""

    status = 404
    code = "model_not_found"


class OverloadedError(RaystreamError):
    """Too many requests wait already; the client may retry later."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        """Keep the seconds after which there should be room, if that is known."""
        super().__init__(message, param)
        self.args = (message, param, retry_after_s)
        self.retry_after_s = retry_after_s


class ReplicaUnavailableError(RaystreamError):
    """The model's replica died or can't be reached."""

    status = 503
    code = "replica_unavailable"


class GenerationFailedError(RaystreamError):
    """The sequence failed inside the engine; no other sequence was disturbed."""

    code = "generation_failed"


class GenerationAbortedError(RaystreamError):
    """The sequence was ended from inside, before its text was finished."""

    status = 503
    code = "generation_aborted"


class DeadlineExceededError(RaystreamError):
    """The answer took longer than the configuration allows; its sequence was aborted."""

    status = 504
    type = "timeout_error"
    code = "timeout"


class FirstTokenTimeoutError(DeadlineExceededError):
    """The first token did not come in time."""

    code = "first_token_timeout"


class StallTimeoutError(DeadlineExceededError):
    """Text came, and then none for too long."""

    code = "stall_timeout"


class TotalTimeoutError(DeadlineExceededError):
    """The answer was not finished in time."""

    code = "total_timeout"
