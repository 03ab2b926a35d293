"""`cache_control`: Anthropic's mark of a prefix to cache, which litellm and others pass on."""

from typing import Annotated, Any

from pydantic import Field

CacheControl = Annotated[
    dict[str, Any] | None,
    Field(
        description="Accepted, but not read: prompts with a common beginning are found without it."
    ),
]
