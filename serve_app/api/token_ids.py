"""Token ids as clients send them: their number is bounded before any of them is looked at.

Whether the model knows them is the replica's to say.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

MAX_NUM_TOKEN_IDS = 2**20
"""More than any model's length; a body has room for ten times as many."""

MAX_TOKEN_ID = 2**31 - 1


def _bounded(token_ids: Any) -> Any:
    if isinstance(token_ids, list) and len(token_ids) > MAX_NUM_TOKEN_IDS:
        raise PydanticCustomError(
            "too_many_token_ids",
            "There are {num} token ids; at most {max} are read.",
            {"num": len(token_ids), "max": MAX_NUM_TOKEN_IDS},
        )
    return token_ids


TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
    Field(fail_fast=True, json_schema_extra={"maxItems": MAX_NUM_TOKEN_IDS}),
    BeforeValidator(_bounded),
]
