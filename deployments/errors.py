"""The error tree. Each class carries the HTTP status, OpenAI's error type and a code.

The classes cross process borders, so each passes all its arguments positionally to
`Exception.__init__`. `serve_app.api.errors` is the one place that turns them into HTTP.
"""


class RaystreamError(Exception):
    """Something went wrong that the client is told about.

    Attributes:
        retry_after_s: When it is worth to come back, if that is known.
    """

    status = 500
    type = "server_error"
    code: str | None = "internal_error"

    def __init__(
        self, message: str, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        """Keep the message for people and the parameter's name, if one is to blame."""
        super().__init__(message, param, retry_after_s)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s

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


class HeadersTooLargeError(InvalidRequestError):
    """The request's headers are larger than the server takes."""

    status = 431
    code = "headers_too_large"


class RequestTimeoutError(InvalidRequestError):
    """The client took too long to send its body."""

    status = 408
    code = "request_timeout"


class InvalidApiKeyError(InvalidRequestError):
    """The request names no API key, or one that is not known here."""

    status = 401
    code = "invalid_api_key"


class RateLimitError(RaystreamError):
    """The API key has used up what it may for now."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class UnsupportedMediaTypeError(InvalidRequestError):
    """The request's body is not declared to be JSON, or is compressed."""

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


class WrongTaskError(InvalidRequestError):
    """The model does something else than what is asked of it."""

    code = "wrong_task"


class OverloadedError(RaystreamError):
    """Too many requests wait already; the client may retry later."""

    status = 503
    type = "overloaded_error"
    code = "overloaded"


class RateLimitsUnavailableError(RaystreamError):
    """What the API key has used can't be looked up, so nobody can say that it may go on."""

    status = 503
    code = "rate_limits_unavailable"


class ReplicaUnavailableError(RaystreamError):
    """The model's replica died or can't be reached."""

    status = 503
    code = "replica_unavailable"


class GenerationFailedError(RaystreamError):
    """The sequence failed inside the engine; no other sequence was disturbed."""

    code = "generation_failed"


class ClassificationFailedError(RaystreamError):
    """The model failed on a text; no other request was disturbed."""

    code = "classification_failed"


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
