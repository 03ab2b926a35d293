"""Opens the answers to a request, and counts the tokens of one: the same for all surfaces."""

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from deployments.contract.errors import InvalidRequestError
from deployments.contract.generation import TokenizedPrompt, TokenizeRequest
from serve_app.api.answers.blocks import Block, BlockReader
from serve_app.api.answers.reader import Finished
from serve_app.api.body.limits import check_prompts
from serve_app.api.generation_body import GenerationBody
from serve_app.api.openai.usage import Usage, read_with_usage
from serve_app.api.reasoning.separation import Separation
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.stream_opener import Continuation
from serve_app.api.tools.offer import ToolOffer
from serve_app.backends.models.catalog import ServedModel
from serve_app.backends.streams.choices import Choices


@dataclass(frozen=True, slots=True)
class OpenAnswer:
    """The answers to a request, whose streams are open.

    Attributes:
        model: The model that answers.
        choices: The streams.
        offer: The functions that the model may call.
        reasoning: How reasoning is separated; None if it is not.
    """

    model: ServedModel
    choices: Choices
    offer: ToolOffer
    reasoning: Separation | None

    def reader(self, draw: Callable[[str], str] = secrets.choice) -> BlockReader:
        """Return a reader of the only answer; `draw` draws the characters of calls' ids."""
        return BlockReader(self.offer, self.reasoning, draw)

    async def read(self) -> tuple[list[Block], Finished, Usage]:
        """Read the only answer to its end; return its blocks, how it ended, and its tokens.

        Raises:
            RaystreamError: The answer has failed.
        """
        (answer,), usage = await read_with_usage(self.choices, self.reasoning)
        return *self.reader().read(answer), usage


async def open_answer(
    context: ApiContext,
    body: GenerationBody,
    request_id: str,
    continuation: Continuation | None = None,
) -> OpenAnswer:
    """Open the answers to a request.

    Args:
        context: The objects that surfaces share.
        body: The request.
        request_id: Names it.
        continuation: What is known of its answer already; None begins it.

    Raises:
        RaystreamError: The request was refused, or no replica could take it. The error names the
            fields that the client has sent.
    """
    model = await context.models.find(body.model)
    with _naming(body.renamed):
        given = body.to_prompts(context.limits)
        prompts = [await context.prompts.read(each, model) for each in given]
        offer = body.to_offer(context.limits, model.description)
        choices = await context.streams.open(model, prompts, body, offer, request_id, continuation)
    reasoning = None
    if body.separates_reasoning:
        reasoning = Separation.of(model.description, choices.reasoning, body.shows_reasoning)
    return OpenAnswer(model, choices, offer, reasoning)


async def tokenize(
    context: ApiContext,
    body: GenerationBody,
    model: ServedModel,
    *,
    add_special_tokens: bool | None = None,
    add_generation_prompt: bool = True,
    with_strings: bool = False,
) -> TokenizedPrompt:
    """Return the tokens that a model would read for the only prompt; see `TokenizeRequest`.

    Raises:
        RaystreamError: See `open_answer`.
    """
    with _naming(body.renamed):
        (given,) = body.to_prompts(context.limits)
        prompt = await context.prompts.read(given, model)
        check_prompts([prompt], context.limits)
        offer = body.to_offer(context.limits, model.description)
        return await model.backend.send(
            TokenizeRequest(
                cast("Any", prompt),  # a text or messages: no body to tokenize has token ids
                add_special_tokens,
                add_generation_prompt,
                with_strings,
                offer.tools,
                body.to_template_kwargs(model.description),
            )
        )


@contextmanager
def _naming(renamed: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields that the client has sent."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = renamed.get(error.param or "", error.param)
        raise
