"""The sampling fields that the surfaces share, and their conversion to `SamplingParams`.

`SamplingParams` checks the bounds. A field that a request leaves out takes the model's default.
"""

import re
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from deployments.contract.errors import InvalidRequestError
from deployments.contract.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_NUM_LOGIT_BIASES,
    MAX_NUM_STOPS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MIN_REPETITION_PENALTY,
)
from serve_app.api.body.wrong_type import wrong_type
from serve_app.api.generation_body import GenerationBody, GrammarMaker
from serve_app.api.structured.response_format import ResponseFormat, to_grammar
from serve_app.api.structured.structured_outputs import (
    OLDER_NAMES,
    StructuredFields,
    structured_grammar,
)

MAX_NUM_STOP_TOKEN_IDS = 128
MAX_ID_LENGTH = 10
TOKEN_ID = re.compile(rf"0|[1-9][0-9]{{0,{MAX_ID_LENGTH - 1}}}")
INT64 = 2**63

_STOP: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 1},
            "maxItems": MAX_NUM_STOPS,
        },
        {"type": "null"},
    ]
}
_LOGIT_BIAS: dict[str, Any] = {
    "anyOf": [
        {
            "type": "object",
            "propertyNames": {"pattern": f"^({TOKEN_ID.pattern})$"},
            "additionalProperties": {
                "type": "number",
                "minimum": -MAX_LOGIT_BIAS,
                "maximum": MAX_LOGIT_BIAS,
            },
            "maxProperties": MAX_NUM_LOGIT_BIASES,
        },
        {"type": "null"},
    ]
}


def _as_list(value: Any) -> Any:
    if not isinstance(value, str | list | None):
        raise wrong_type("a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _bounded(value: Any) -> Any:
    """Refuse a mapping that is too large before its entries are validated."""
    if isinstance(value, dict) and len(value) > MAX_NUM_LOGIT_BIASES:
        raise PydanticCustomError(
            "logit_bias",
            "logit_bias must hold at most {max} tokens.",
            {"max": MAX_NUM_LOGIT_BIASES},
        )
    return value


class SamplingFields(StructuredFields, GenerationBody):
    """How tokens are sampled and when the text ends. Null means the model's default."""

    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of the answer. More than the model's length leaves means all that "
        "it leaves, unless the server's configuration refuses that.",
    )
    temperature: float | None = Field(
        default=None,
        description="0 means greedy decoding.",
        json_schema_extra={"minimum": 0, "maximum": 2},
    )
    top_p: float | None = Field(
        default=None, json_schema_extra={"exclusiveMinimum": 0, "maximum": 1}
    )
    top_k: int | None = Field(
        default=None, description="0 and -1 keep all tokens.", json_schema_extra={"minimum": -1}
    )
    min_p: float | None = Field(
        default=None,
        description="Keep tokens at least this fraction as probable as the likeliest one.",
        json_schema_extra={"minimum": 0, "maximum": 1},
    )
    repetition_penalty: float | None = Field(
        default=None,
        description="Above 1 makes tokens of the prompt and the answer so far less likely.",
        json_schema_extra={"minimum": MIN_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
    )
    presence_penalty: float | None = Field(
        default=None,
        description="Subtracted from the logits of tokens that the answer holds already.",
        json_schema_extra={"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY},
    )
    frequency_penalty: float | None = Field(
        default=None,
        description="Subtracted from a token's logit for each time that the answer holds it.",
        json_schema_extra={"minimum": -MAX_PENALTY, "maximum": MAX_PENALTY},
    )
    logit_bias: Annotated[
        dict[str, float] | None, BeforeValidator(_bounded), WithJsonSchema(_LOGIT_BIAS)
    ] = Field(
        default=None,
        description="Added to the logits, by token id; from -100 to 100.",
    )
    min_tokens: int | None = Field(
        default=None,
        description="The answer does not end before it has this many tokens.",
        json_schema_extra={"minimum": 0},
    )
    seed: int | None = Field(
        default=None,
        ge=-INT64,
        lt=INT64,
        description="The same seed gives the same text. Null means a random seed.",
    )
    stop: Annotated[
        Annotated[list[str], Field(fail_fast=True)] | None,
        BeforeValidator(_as_list),
        WithJsonSchema(_STOP),
    ] = Field(default=None, description="Strings that end the text; the text does not hold them.")
    stop_token_ids: (
        list[Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]] | None
    ) = Field(default=None, max_length=MAX_NUM_STOP_TOKEN_IDS)
    ignore_eos: bool | None = Field(
        default=None, description="Continue past the model's end-of-text token, up to max_tokens."
    )
    response_format: ResponseFormat | None = Field(
        default=None,
        description="Null and type text allow any text. A JSON schema is always enforced, but for "
        "keywords that a header names; with strict: true, a schema with such keywords is refused.",
    )

    @property
    def num_tokens_wanted(self) -> int | None:
        """Most tokens of the answer."""
        return self.max_tokens

    @property
    def num_logprobs_wanted(self) -> int | None:
        """How many of the likeliest tokens to return at each position; None: no logprobs."""
        return None

    @property
    def num_prompt_logprobs_wanted(self) -> int | None:
        """The same for the prompt's positions; None: no logprobs of the prompt."""
        return None

    separates_reasoning: ClassVar[bool] = False
    at_most_one: ClassVar[tuple[str, ...]] = (
        "response_format",
        "structured_outputs",
        *OLDER_NAMES,
    )

    def grammar_maker(self) -> GrammarMaker | None:
        """Return what makes the grammar of the text; see `GenerationBody`."""
        if self.response_format is not None:
            return partial(to_grammar, self.response_format)
        return None if self.constraining_field is None else partial(structured_grammar, self)

    def sampling(self) -> Mapping[str, Any]:
        """Return the parameters of `SamplingParams` by name; see `GenerationBody`."""
        return {
            "max_tokens": self.num_tokens_wanted,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": None if self.logit_bias is None else _to_pairs(self.logit_bias),
            "min_tokens": self.min_tokens,
            "top_logprobs": self.num_logprobs_wanted,
            "prompt_logprobs": self.num_prompt_logprobs_wanted,
            "stop": None if self.stop is None else tuple(self.stop),
            "stop_token_ids": _frozen(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            # OpenAI's seeds may be negative, ours may not.
            "seed": None if self.seed is None else self.seed & MAX_SEED,
        }


def _to_pairs(logit_bias: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    """Return the biases by token id.

    Raises:
        InvalidRequestError: A key is not a token id, written as a number in JSON.
    """
    wrong = next((key for key in logit_bias if not TOKEN_ID.fullmatch(key)), None)
    if wrong is not None:
        raise InvalidRequestError(f"{wrong[:MAX_ID_LENGTH]!r} is not a token id.", "logit_bias")
    return tuple((int(key), bias) for key, bias in logit_bias.items())


def _frozen(token_ids: list[int] | None) -> frozenset[int] | None:
    return None if token_ids is None else frozenset(token_ids)
