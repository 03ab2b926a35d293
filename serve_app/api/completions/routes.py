"""`POST /v1/completions`: continues one text or several, without a chat template."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from fastapi import APIRouter, Request, Response

from deployments.contract.errors import InvalidRequestError
from deployments.contract.sampling_params import MAX_NUM_PROMPT_LOGPROBS
from serve_app.api.completions.answer import CompletionFramer, whole_answer
from serve_app.api.completions.schema import Completion, CompletionChunk, CompletionRequest
from serve_app.api.openai.answer_stream import AnswerHead
from serve_app.api.requests.chunked_answer import ChunkedAnswer, answered
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.open_answer import open_answer
from serve_app.backends.models.catalog import ServedModel
from serve_app.backends.replicas.backend import DetokenizeRequest
from serve_app.backends.streams.choices import Choices
from serve_app.http.json_route import JsonRoute
from serve_app.http.route_docs import event_stream

_EXAMPLE: Final = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"pydoc-chat",'
    '"choices":[{"index":0,"text":"Join","logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)


@dataclass(frozen=True, slots=True)
class OpenCompletion(ChunkedAnswer[Completion]):
    """The continuations of one text or several; reasoning is separated only in chat.

    Attributes:
        body: What is asked for.
        echoes: The prompts' texts, if the request asks to repeat them.
    """

    body: CompletionRequest
    echoes: list[str] | None

    @classmethod
    async def of(cls, context: ApiContext, body: CompletionRequest, request_id: str) -> Self:
        """Open the streams.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        opened = await open_answer(context, body, request_id)
        model, choices = opened.model, opened.choices
        try:
            _check_prompt_logprobs(choices, body)
            echoes = await _texts(body.prompts, model) if body.echo else None
        except BaseException:
            await choices.aclose()
            raise
        head = AnswerHead.begin(f"cmpl-{request_id}", model.description.id, choices, context.clock)
        return cls(head, choices, None, body, echoes)

    def framer(self) -> CompletionFramer:
        """Return what makes the choices of a stream's chunks."""
        return CompletionFramer(
            self.echoes, self.choices.num_per_prompt, self.body.num_echoed_logprobs
        )

    def whole(self) -> Awaitable[Completion]:
        """Read the streams to their end, and return the whole answer; see `whole_answer`."""
        return whole_answer(self.head, self.choices, self.body, self.echoes)


class CompletionsApi:
    """Continues texts."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["completions"])
        router.add_api_route(
            "/v1/completions",
            self.complete,
            methods=["POST"],
            summary="Continue a text",
            response_model=Completion,
            responses=event_stream(
                "The whole answer; with stream: true, its chunks as events.",
                _EXAMPLE,
                CompletionChunk,
            ),
        )
        return router

    async def complete(self, body: CompletionRequest, request: Request) -> Completion | Response:
        """Continue each prompt, once or n times, whole or as a stream of chunks.

        With the id of an event in Last-Event-ID, send only what follows that event.
        """
        return await answered(self._context, body, request, "text_completion", OpenCompletion.of)


def _check_prompt_logprobs(choices: Choices, fields: CompletionRequest) -> None:
    """Refuse more log-probabilities of prompts than one answer may hold.

    The engine checks each prompt by itself. A request may hold several, and each of the n answers
    to a prompt repeats them.
    """
    num_top = fields.num_prompt_logprobs_wanted
    if num_top is None:
        return
    num_tokens = choices.num_prompt_tokens * choices.num_per_prompt
    number = num_tokens * (1 + num_top)
    if number > MAX_NUM_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"The prompts, each n times, have {num_tokens} tokens, and {1 + num_top} "
            f"log-probabilities of each are {number}; one request may have at most "
            f"{MAX_NUM_PROMPT_LOGPROBS}. Ask for fewer of the likeliest tokens, lower n, or send "
            "several requests.",
            fields.prompt_logprobs_param,
        )


async def _texts(prompts: Sequence[str | tuple[int, ...]], model: ServedModel) -> list[str]:
    """Return the texts of prompts. The replica detokenizes those that are token ids.

    Raises:
        InvalidRequestError: A token id is not in the model's vocabulary.
        RaystreamError: The replica can't be reached, or its tokenizer is overloaded.
    """

    async def text_of(prompt: str | tuple[int, ...]) -> str:
        if isinstance(prompt, str):
            return prompt
        return await model.backend.send(DetokenizeRequest(prompt))

    try:
        return await asyncio.gather(*map(text_of, prompts))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, "prompt") from None
