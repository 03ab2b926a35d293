"""What the surfaces of stored things share: whose a request sees, and in what order."""

from typing import Annotated, Final, Literal

from fastapi import Query, Request

from deployments.contract.errors import JobsDisabledError
from serve_app.api.requests.context import ApiContext
from serve_app.http.request_record import record_of
from serve_app.jobs.jobs import Jobs

DISABLED: Final = (
    "This server keeps no files, batches and responses. To keep them, name a folder on its disk "
    "under jobs.folder in its configuration, and deploy again."
)

After = Annotated[
    str | None,
    Query(max_length=64, description="The id of the last one of the page before; null begins."),
]
Order = Annotated[
    Literal["asc", "desc"], Query(description="`desc`: the newest first. `asc`: the oldest first.")
]


def jobs_of(context: ApiContext) -> Jobs:
    """Return the jobs of the server.

    Raises:
        JobsDisabledError: It keeps none.
    """
    if context.jobs is None:
        raise JobsDisabledError(DISABLED)
    return context.jobs


def owner_of(request: Request) -> str:
    """Return whose jobs a request sees: those of its API key; all without keys."""
    return record_of(request.scope).key_name or ""
