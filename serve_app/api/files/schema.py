"""The answers of `/v1/files`.

Source: https://platform.openai.com/docs/api-reference/files
"""

from typing import Literal, Self

from pydantic import BaseModel, Field

from serve_app.jobs.files import StoredFile


class FileObject(BaseModel):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int = Field(description="When it is erased.")
    filename: str
    purpose: Literal["batch", "batch_output"] = Field(
        description="`batch_output`: a batch wrote it."
    )
    status: Literal["processed"] = "processed"
    status_details: None = None

    @classmethod
    def of(cls, file: StoredFile) -> Self:
        """Return the object of a file."""
        return cls(
            id=file.id,
            bytes=file.num_bytes,
            created_at=int(file.created_s),
            expires_at=int(file.expires_s),
            filename=file.filename,
            purpose="batch" if file.purpose == "batch" else "batch_output",
        )


class FileList(BaseModel):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    """A file that is erased."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
