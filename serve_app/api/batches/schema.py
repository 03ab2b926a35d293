"""The bodies and answers of `/v1/batches`.

Source: https://platform.openai.com/docs/api-reference/batch
"""

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, Field

from serve_app.api.body.strict_body import StrictBody
from serve_app.jobs.batch import Batch, Status

Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/v1/classify",
    "/v1/rerank",
    "/v2/rerank",
]

Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
]

SECONDS_OF: Final = {"m": 60, "h": 3600, "d": 86400}


class BatchRequest(StrictBody):
    """The body of `POST /v1/batches`."""

    input_file_id: str = Field(
        min_length=1, max_length=128, description="A file of requests, one line each."
    )
    endpoint: Endpoint = Field(description="The route that all lines ask; each line's `url`.")
    completion_window: str = Field(
        pattern=r"^[1-9][0-9]{0,3}[mhd]$",
        description="How long it may take, in minutes, hours or days, such as 24h. Then lines that "
        "have not run get the error `batch_expired`.",
    )
    metadata: Metadata | None = Field(default=None, description="Notes of the client's own.")

    @property
    def window_s(self) -> float:
        """The window in seconds."""
        return float(int(self.completion_window[:-1]) * SECONDS_OF[self.completion_window[-1]])


class BatchError(BaseModel):
    """Why a batch has failed as a whole."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel):
    """The errors of a batch that has failed."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchCounts(BaseModel):
    """How far a batch is."""

    total: int = Field(description="0 while the file is being checked.")
    completed: int = Field(description="Lines with an answer.")
    failed: int = Field(description="Lines with an error.")


class BatchObject(BaseModel):
    """A batch. Times are Unix seconds; null if it has not come to that."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = Field(description="The answers; null if there are none.")
    error_file_id: str | None = Field(description="The errors; null if there are none.")
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: Batch) -> Self:
        """Return the object of a batch."""
        fault = batch.fault
        moments: dict[str, Any] = {
            f"{status}_at": None for status in Status if status is not Status.VALIDATING
        }
        moments.update({f"{status}_at": int(when) for status, when in batch.moments.items()})
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            errors=None
            if fault is None
            else BatchErrors(
                data=[BatchError(code=fault.code, message=fault.message, param=fault.param)]
            ),
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=batch.status,
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            created_at=int(batch.created_s),
            expires_at=int(batch.due_s),
            request_counts=BatchCounts(
                total=batch.num_lines, completed=batch.num_completed, failed=batch.num_failed
            ),
            metadata=None if batch.metadata is None else dict(batch.metadata),
            **moments,
        )


class BatchList(BaseModel):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
