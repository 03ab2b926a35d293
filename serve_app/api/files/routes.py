"""`/v1/files`: OpenAI's files, as far as batches need them.

An upload is a form, which is read here piece by piece and written to the store as it comes.
"""

import asyncio
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from starlette.responses import Response, StreamingResponse

from deployments.contract.errors import (
    InvalidRequestError,
    RequestTimeoutError,
)
from serve_app.api.files.schema import FileDeleted, FileList, FileObject
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.job_lists import After, Order, jobs_of, owner_of
from serve_app.config import LimitsConfig
from serve_app.http.form import FormReader, Part
from serve_app.http.json_route import file_too_large
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.store import Page

if TYPE_CHECKING:
    from serve_app.jobs.files import FileWriter

MAX_FIELD_BYTES: Final = 256
MAX_NAME_LENGTH: Final = 256
MAX_LIST: Final = 10_000

FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
MIN_LIFETIME_S: Final = 3600

_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_LIFETIME_S},
                    },
                }
            }
        },
    }
}


class FilesApi:
    """Keeps files."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["batches"])
        router.add_api_route(
            "/v1/files",
            self.create,
            methods=["POST"],
            summary="Upload a file of requests",
            openapi_extra=_FORM,
        )
        router.add_api_route(
            "/v1/files", self.list_files, summary="List the files", response_model=FileList
        )
        router.add_api_route("/v1/files/{file_id}", self.retrieve, summary="Show a file")
        router.add_api_route(
            "/v1/files/{file_id}", self.delete, methods=["DELETE"], summary="Erase a file"
        )
        router.add_api_route(
            "/v1/files/{file_id}/content",
            self.content,
            summary="Return a file's contents",
            response_class=StreamingResponse,
            responses={200: {"content": {"application/octet-stream": {}}}},
        )
        return router

    async def create(self, request: Request) -> FileObject:
        """Keep a file, whose lines are requests of a batch."""
        self._context.operators.require_own_page(request)
        jobs, owner = jobs_of(self._context), owner_of(request)
        upload = _Upload(jobs, self._context.limits)
        form = FormReader(request.headers.get("content-type", ""))
        await jobs.files.require_room(owner)
        try:
            await upload.read(request, form)
            lifetime_s = upload.checked_lifetime_s()
            file = await jobs.files.add(upload.writer, owner, upload.filename, lifetime_s)
        finally:
            await upload.writer.discard()
        return FileObject.of(file)

    async def list_files(
        self,
        request: Request,
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=MAX_LIST)] = MAX_LIST,
        order: Order = "desc",
        purpose: Annotated[str | None, Query(max_length=64)] = None,
    ) -> Response:
        """List the API key's files, a page at a time."""
        jobs = jobs_of(self._context)
        page = Page(after, limit, order == "desc")
        files, has_more = await jobs.files.page(owner_of(request), page, purpose)

        def listed() -> str:
            return FileList(
                data=[FileObject.of(each) for each in files],
                first_id=files[0].id if files else None,
                last_id=files[-1].id if files else None,
                has_more=has_more,
            ).model_dump_json()

        # On a thread: a page of 10,000 would keep all streams waiting.
        text = await asyncio.to_thread(listed)
        return Response(text, media_type="application/json")

    async def retrieve(self, file_id: str, request: Request) -> FileObject:
        """Show one file."""
        jobs = jobs_of(self._context)
        return FileObject.of(await jobs.files.find(owner_of(request), file_id))

    async def delete(self, file_id: str, request: Request) -> FileDeleted:
        """Erase a file from the disk, unless a batch still reads it."""
        await jobs_of(self._context).files.delete(owner_of(request), file_id)
        return FileDeleted(id=file_id)

    async def content(self, file_id: str, request: Request) -> StreamingResponse:
        """Return what a file holds."""
        jobs = jobs_of(self._context)
        file = await jobs.files.find(owner_of(request), file_id)
        return StreamingResponse(
            jobs.files.pieces(file.id),
            media_type="application/octet-stream",
            headers={
                "Content-Length": str(file.num_bytes),
                "Content-Disposition": "attachment",
                "X-Content-Type-Options": "nosniff",
            },
        )


class _Upload:
    """A form on its way into the store.

    Attributes:
        writer: Writes its file.
        filename: The client's name for the file.
    """

    def __init__(self, jobs: Jobs, limits: LimitsConfig) -> None:
        self.writer: FileWriter = jobs.files.writer()
        self.filename = ""
        self._config = jobs.config
        self._limits = limits
        self._part: Part | None = None
        self._fields: dict[str, bytes] = {}
        self._has_file = False

    async def read(self, request: Request, form: FormReader) -> None:
        """Read the whole form.

        Raises:
            InvalidRequestError: It is broken, too large, or came too slowly.
            JobsUnavailableError: The store can't be written.
            ClientDisconnect: The client has left before it had sent all.
        """
        limits = self._limits
        # A file may take as long as it would in bodies of other requests.
        max_s = limits.max_body_read_s * ceil(self._config.max_file_bytes / limits.max_body_bytes)
        try:
            async with asyncio.timeout(max_s):
                async for piece in request.stream():
                    for each in form.feed(piece):
                        await self._take(each)
        except TimeoutError:
            raise RequestTimeoutError(f"The file did not come within {max_s:g} s.") from None
        if not form.has_ended:
            raise InvalidRequestError("The form is broken: it has no end.")
        if not self._has_file:
            raise InvalidRequestError("file is missing: a part with a filename.", "file")

    def checked_lifetime_s(self) -> float | None:
        """Return after how many seconds the client wants the file erased; None if it does not say.

        Raises:
            InvalidRequestError: A field is wrong or missing.
        """
        fields = {name: value.decode("utf-8", "replace") for name, value in self._fields.items()}
        if (purpose := fields.get("purpose")) != "batch":
            found = "it is missing" if purpose is None else f"it is {purpose[:64]!r}"
            raise InvalidRequestError(f"purpose must be 'batch'; {found}.", "purpose")
        anchor, seconds = fields.get(FIELDS[1]), fields.get(FIELDS[2])
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise InvalidRequestError("expires_after[anchor] must be 'created_at'.", FIELDS[1])
        most = int(self._config.expires_after_s)
        is_number = seconds is not None and seconds.isascii() and seconds.isdecimal()
        if not is_number or not MIN_LIFETIME_S <= int(seconds or "") <= most:
            raise InvalidRequestError(
                f"expires_after[seconds] must be from {MIN_LIFETIME_S} to {most} "
                "(jobs.expires_after_s).",
                FIELDS[2],
            )
        return int(seconds or "")

    async def _take(self, each: Part | bytes) -> None:
        if isinstance(each, Part):
            self._begin(each)
        elif self._part is not None and self._part.name == "file":
            if self.writer.num_bytes + len(each) > self._config.max_file_bytes:
                raise file_too_large(self._config.max_file_bytes)
            await self.writer.write(each)
        elif self._part is not None:
            value = self._fields[self._part.name] + each
            if len(value) > MAX_FIELD_BYTES:
                raise InvalidRequestError("A field of the form is too long.", self._part.name)
            self._fields[self._part.name] = value

    def _begin(self, part: Part) -> None:
        """Note the part whose value follows.

        Raises:
            InvalidRequestError: It is unknown, or there for a second time.
        """
        name = part.name[:64]
        if part.name == "file":
            if self._has_file:
                raise InvalidRequestError("The form has two files; send one.", "file")
            if part.filename is None:
                raise InvalidRequestError("file must be a file, with a filename.", "file")
            self._has_file = True
            self.filename = part.filename[:MAX_NAME_LENGTH]
        elif part.name not in FIELDS:
            raise InvalidRequestError(f"The form has an unknown field {name!r}.", name)
        elif part.name in self._fields:
            raise InvalidRequestError(f"The form has the field {name!r} twice.", name)
        else:
            self._fields[part.name] = b""
        self._part = part
