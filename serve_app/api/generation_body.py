"""What a request asks a generating model for, whatever its surface."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from deployments.contract.descriptions import ModelDescription
from deployments.contract.errors import InvalidRequestError
from deployments.contract.messages import TemplatePairs
from deployments.contract.sampling_params import (
    GRAMMAR_PARAM,
    InvalidParameterError,
    SamplingParams,
)
from serve_app.api.body.limits import Prompt
from serve_app.api.body.strict_body import StrictBody
from serve_app.api.conversation import Conversation
from serve_app.api.structured.answer_grammar import AnswerGrammar, GrammarSettings
from serve_app.api.tools.offer import NO_TOOLS, ToolOffer
from serve_app.config import LimitsConfig

GrammarMaker = Callable[[GrammarSettings], AnswerGrammar | None]


class GenerationBody(StrictBody):
    """A request to a generating model; its surface says what differs from this.

    Attributes:
        stop_param: The surface's name of the stop strings.
        format_param: Its name of the field that holds a format of the text.
        separates_reasoning: Whether its answers have a place for the reasoning.
    """

    model: str | None = Field(
        default=None, description="Null means the first model that generates."
    )

    stop_param: ClassVar[str] = "stop"
    format_param: ClassVar[str] = GRAMMAR_PARAM
    separates_reasoning: ClassVar[bool] = True

    @property
    def renamed(self) -> Mapping[str, str]:
        """The request's own names of the fields that errors of others name, by those names."""
        differs = self.format_param != GRAMMAR_PARAM
        return {GRAMMAR_PARAM: self.format_param} if differs else {}

    @property
    def asked_priority(self) -> int | None:
        """The priority that the request names; None means that of its API key, or 0."""
        return None

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return 1

    def to_prompts(self, limits: LimitsConfig) -> Sequence[Conversation | Prompt]:
        """Return the prompts.

        Raises:
            InvalidRequestError: They can't be honoured.
        """
        raise NotImplementedError

    def to_offer(self, limits: LimitsConfig, model: ModelDescription) -> ToolOffer:
        """Return the functions that the model may call; see `tools.schema.to_offer`.

        Raises:
            InvalidRequestError: The tools or the choice of one are refused.
        """
        return NO_TOOLS

    def to_template_kwargs(self, model: ModelDescription) -> TemplatePairs:
        """Return values for the chat template."""
        return ()

    @property
    def shows_reasoning(self) -> bool:
        """Whether the client gets the reasoning."""
        return True

    @property
    def max_reasoning_tokens(self) -> int | None:
        """Most tokens of the reasoning; None sets no limit."""
        return None

    @property
    def length_param(self) -> str:
        """The name of the field that holds the most tokens of the answer."""
        return "max_tokens"

    @property
    def default_max_tokens(self) -> int | None:
        """Most tokens of the answer if the request sets no limit; None means the model's limit."""
        return None

    @property
    def constraining_field(self) -> str | None:
        """The field that constrains the text, if there is one; `format_param` does not count."""
        return None

    def grammar_maker(self) -> GrammarMaker | None:
        """Return what makes the grammar of the text, in a `schema_executor`; None for any text.

        It raises an InvalidRequestError if a schema is too large, or can't be honoured.
        """
        return None

    def sampling(self) -> Mapping[str, Any]:
        """Return the parameters of `SamplingParams` by name; None means the model's default."""
        raise NotImplementedError

    def to_sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Return the engine's parameters, with a random seed if the request sets none.

        Args:
            defaults: The model's defaults.

        Raises:
            InvalidRequestError: A value is out of bounds.
        """
        given = {name: value for name, value in self.sampling().items() if value is not None}
        # Seeds need no secure random numbers, and asking the system for those would let other
        # threads run first.
        given.setdefault("seed", random.getrandbits(63))
        try:
            return replace(defaults, **given)
        except InvalidParameterError as error:
            message = error.message.replace("max_tokens", self.length_param)
            raise InvalidRequestError(message, error.param) from None
