"""The field `priority` of a body: which of the requests that wait runs first."""

from typing import Annotated

from pydantic import Field

from serve_app.config import MAX_PRIORITY, MIN_PRIORITY

Priority = Annotated[
    int | None,
    Field(
        ge=MIN_PRIORITY,
        le=MAX_PRIORITY,
        description="Lower runs first. Null means the API key's own, or 0. A better one than the "
        "key allows is refused.",
    ),
]
