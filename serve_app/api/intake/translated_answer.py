"""Opens the answer to a request of an API that is translated to chat completions."""

from dataclasses import dataclass
from typing import Protocol

from deployments.contract.descriptions import ModelDescription
from deployments.contract.messages import TemplatePairs
from serve_app.api.answers.blocks import Block, BlockReader
from serve_app.api.answers.reader import Finished
from serve_app.api.intake.context import ApiContext
from serve_app.api.intake.conversation import Conversation
from serve_app.api.openai.sampling_schema import SamplingFields
from serve_app.api.openai.usage import Usage, read_with_usage
from serve_app.api.reasoning.separation import Separation
from serve_app.api.tools.offer import ToolOffer
from serve_app.backends.streams.choices import Choices
from serve_app.config import LimitsConfig


class TranslatedBody(Protocol):
    """A body that can be read as one of chat completions."""

    @property
    def model(self) -> str | None:
        """The model's name; None means the first model that generates."""
        ...

    @property
    def max_reasoning_tokens(self) -> int | None:
        """Most tokens of the reasoning; None sets no limit."""
        ...

    def to_conversation(self) -> Conversation:
        """Return the messages, which know their places in the request."""
        ...

    def to_offer(self, limits: LimitsConfig, model: ModelDescription) -> ToolOffer:
        """Return the functions that the model may call."""
        ...

    def to_fields(self) -> SamplingFields:
        """Return the fields of sampling."""
        ...

    def to_template_kwargs(self, model: ModelDescription) -> TemplatePairs:
        """Return values for the chat template."""
        ...


@dataclass(frozen=True, slots=True)
class TranslatedAnswer:
    """The only answer to a request.

    Attributes:
        model_id: The model that answers.
        choices: Its stream.
        reader: Reads its blocks.
        reasoning: How reasoning is separated; None if it is not.
    """

    model_id: str
    choices: Choices
    reader: BlockReader
    reasoning: Separation | None

    async def read(self) -> tuple[list[Block], Finished, Usage]:
        """Read the answer to its end; return its blocks, how it ended, and its tokens.

        Raises:
            RaystreamError: The answer has failed.
        """
        (answer,), usage = await read_with_usage(self.choices, self.reasoning)
        return *self.reader.read(answer), usage


async def open_answer(
    context: ApiContext, body: TranslatedBody, request_id: str
) -> TranslatedAnswer:
    """Open the answer to a request.

    Raises:
        RaystreamError: The request was refused, or no replica could take it. The error names the
            fields that the client has sent.
    """
    model = await context.models.find(body.model)
    conversation = body.to_conversation()
    with conversation.renaming():
        prompt = await context.prompts.read(conversation.bodies(), model)
        offer = body.to_offer(context.limits, model.description)
        choices = await context.streams.open_choices(
            model,
            [prompt],
            body.to_fields(),
            request_id,
            1,
            offer,
            body.to_template_kwargs(model.description),
            model.description.reasoning,
            body.max_reasoning_tokens,
        )
    reasoning = Separation.of(model.description, choices.reasoning)
    return TranslatedAnswer(model.description.id, choices, BlockReader(offer, reasoning), reasoning)
