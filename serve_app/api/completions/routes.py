"""`POST /v1/completions`: continues one text or several, without a chat template."""

import asyncio
from collections.abc import Sequence
from typing import Final

from fastapi import APIRouter, Request

from deployments.errors import InvalidRequestError
from serve_app.api.completions.answer import CompletionFramer, whole_answer
from serve_app.api.completions.schema import Completion, CompletionChunk, CompletionRequest
from serve_app.api.intake.context import ApiContext
from serve_app.api.openai.answer_stream import AnswerHead, ChunkWriter, answer_events
from serve_app.backends.catalog import ServedModel
from serve_app.backends.choices import Choices
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of
from serve_app.http.route_docs import event_stream
from serve_app.streaming.event_stream import EventStreamResponse

_EXAMPLE: Final = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"pydoc-chat",'
    '"choices":[{"index":0,"text":"Join","logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)


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

    async def complete(
        self, body: CompletionRequest, request: Request
    ) -> Completion | EventStreamResponse:
        """Continue each prompt, once or n times, whole or as a stream of chunks."""
        return await self._context.answer(
            body.model, lambda: self._answer(body, request), streams=bool(body.stream)
        )

    async def _answer(
        self, body: CompletionRequest, request: Request
    ) -> Completion | EventStreamResponse:
        context, request_id = self._context, request_id_of(request)
        model = await context.models.find(body.model)
        prompts, num_per_prompt = body.prompts, body.n or 1
        self._require_room(len(prompts) * num_per_prompt)
        choices = await context.streams.open_choices(
            model, prompts, body, request_id, num_per_prompt
        )
        echoes = await _echoes(prompts, model, choices) if body.echo else None
        head = AnswerHead.begin(f"cmpl-{request_id}", body.model, choices, context.clock)
        if not body.stream:
            return await whole_answer(head, choices, echoes)
        writer = ChunkWriter(head, "text_completion", body.stream_options, choices)
        events = answer_events(choices, CompletionFramer(echoes, num_per_prompt), writer)
        return EventStreamResponse(events, choices, sleep=context.clock.sleep)

    def _require_room(self, num_answers: int) -> None:
        most = self._context.limits.max_num_prompts
        if num_answers > most:
            raise InvalidRequestError(
                f"The prompts, each n times, need {num_answers} answers; one request may have at "
                f"most {most} (limits.max_num_prompts). Send several requests.",
                "prompt",
            )


async def _echoes(
    prompts: Sequence[str | tuple[int, ...]], model: ServedModel, choices: Choices
) -> list[str]:
    """Return the prompts' texts; if that fails, close the choices, whose streams are open.

    Raises:
        RaystreamError: See `_texts`.
    """
    try:
        return await _texts(prompts, model)
    except BaseException:
        await choices.aclose()
        raise


async def _texts(prompts: Sequence[str | tuple[int, ...]], model: ServedModel) -> list[str]:
    """Return the texts of prompts. The replica detokenizes those that are token ids.

    Raises:
        InvalidRequestError: A token id is not in the model's vocabulary.
        RaystreamError: The replica can't be reached, or its tokenizer is overloaded.
    """

    async def text_of(prompt: str | tuple[int, ...]) -> str:
        return prompt if isinstance(prompt, str) else await model.backend.detokenize(prompt)

    try:
        return await asyncio.gather(*map(text_of, prompts))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, "prompt") from None
