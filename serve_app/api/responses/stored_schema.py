"""Stored responses on the wire: their input items and their erasure.

Source: https://platform.openai.com/docs/api-reference/responses/input-items
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field


class InputItemList(BaseModel):
    """A page of what a response's model has read: its conversation, then its own input."""

    object: Literal["list"] = "list"
    data: list[Annotated[dict[str, Any], Field(description="An item, as in `input` or `output`.")]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(BaseModel):
    """A response that was erased."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True
