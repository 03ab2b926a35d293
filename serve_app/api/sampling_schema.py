"""The sampling fields that the surfaces share, and what becomes of them.

Bounds belong to `SamplingParams`; what a request leaves out is the model's own default.
"""

import secrets
from dataclasses import replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from deployments.contract import InvalidParameterError, SamplingParams
from deployments.engine.sampling_params import MAX_SEED
from deployments.errors import InvalidRequestError
from serve_app.api.strict_body import StrictBody

MAX_NUM_STOP_TOKEN_IDS = 128
INT64 = 2**63


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class SamplingFields(StrictBody):
    """How tokens are chosen and when the text ends; null means the model's default."""

    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens of the answer.")
    temperature: float | None = Field(
        default=None, description="0 means greedy.", json_schema_extra={"minimum": 0, "maximum": 2}
    )
    top_p: float | None = Field(
        default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1}
    )
    top_k: int | None = Field(
        default=None, description="0 and -1 keep all tokens.", json_schema_extra={"minimum": -1}
    )
    seed: int | None = Field(
        default=None,
        ge=-INT64,
        lt=INT64,
        description="The same seed gives the same text. Drawn at random if null.",
    )
    stop: Annotated[
        Annotated[list[str], Field(fail_fast=True)] | None,
        BeforeValidator(_as_list, json_schema_input_type=str | list[str] | None),
    ] = Field(default=None, description="Strings that end the text; it holds none of them.")
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_NUM_STOP_TOKEN_IDS)
    ignore_eos: bool | None = Field(
        default=None, description="Go on past the model's end, up to max_tokens."
    )

    @property
    def num_tokens_wanted(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    def to_sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters for the engine, with a random seed if the request names none.

        Args:
            defaults: The model's.

        Raises:
            InvalidRequestError: A value is out of bounds.
        """
        given: dict[str, Any] = {
            "max_tokens": self.num_tokens_wanted,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "stop": None if self.stop is None else tuple(self.stop),
            "stop_token_ids": _frozen(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            # OpenAI's seeds may be negative; ours are not.
            "seed": secrets.randbits(63) if self.seed is None else self.seed & MAX_SEED,
        }
        try:
            return replace(defaults, **{key: given[key] for key in given if given[key] is not None})
        except InvalidParameterError as error:
            raise InvalidRequestError(error.message, error.param) from None


def _frozen(token_ids: list[int] | None) -> frozenset[int] | None:
    return None if token_ids is None else frozenset(token_ids)
