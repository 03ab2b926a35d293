"""`POST /v1/completions`: a text, or several, continued as they stand."""

import asyncio
from collections.abc import Sequence
from typing import Final

from fastapi import APIRouter, Request

from deployments.errors import InvalidRequestError
from serve_app.api.answer_stream import AnswerHead, ChunkWriter, answer_events
from serve_app.api.chunk_schema import CompletionChunk
from serve_app.api.completion_chunks import CompletionFramer
from serve_app.api.completion_logprobs import LogprobsWriter
from serve_app.api.completions_schema import Completion, CompletionChoice, CompletionRequest
from serve_app.api.context import ApiContext
from serve_app.api.json_route import JsonRoute
from serve_app.api.openapi import ANSWER_ERRORS, errors, event_stream
from serve_app.api.usage import UsageTally
from serve_app.catalog import ServedModel
from serve_app.choices import Choices
from serve_app.event_stream import EventStreamResponse
from serve_app.generation import Piece
from serve_app.request_id import request_id_of

_EXAMPLE: Final = (
    'data: {"id":"cmpl-1","object":"text_completion","created":1,"model":"pydoc-chat",'
    '"choices":[{"index":0,"text":"Join","logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)


class CompletionsApi:
    """Continues texts."""

    def __init__(self, context: ApiContext) -> None:
        """Keep what every surface is given."""
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
            responses={
                **event_stream(
                    "The answer; with stream: true, its chunks as events.",
                    _EXAMPLE,
                    CompletionChunk,
                ),
                **errors(*ANSWER_ERRORS),
            },
        )
        return router

    async def complete(
        self, body: CompletionRequest, request: Request
    ) -> Completion | EventStreamResponse:
        """Continue each prompt, once or n times, whole or as a stream of chunks."""
        model = await self._context.find_model(body.model)
        prompts, num_per_prompt = body.prompts, body.n or 1
        self._require_room(len(prompts) * num_per_prompt)
        request_id = request_id_of(request)
        choices = await self._context.open_choices(model, prompts, body, request_id, num_per_prompt)
        echoes = await _echoes(prompts, model, choices) if body.echo else None
        head = self._context.answer_head(f"cmpl-{request_id}", body.model, model)
        if not body.stream:
            return await _completion(head, choices, echoes)
        writer = ChunkWriter(head, "text_completion", body.stream_options, choices)
        events = answer_events(choices, CompletionFramer(echoes, num_per_prompt), writer)
        return EventStreamResponse(events, choices, sleep=self._context.clock.sleep)

    def _require_room(self, num_answers: int) -> None:
        most = self._context.limits.max_num_prompts
        if num_answers > most:
            raise InvalidRequestError(
                f"The prompts, each n times, make {num_answers} texts; at most {most} run for one "
                "request (limits.max_num_prompts). Send several requests.",
                "prompt",
            )


async def _echoes(
    prompts: Sequence[str | tuple[int, ...]], model: ServedModel, choices: Choices
) -> list[str]:
    """Return the prompts' texts for answers that are admitted; where that fails, close them.

    Raises:
        RaystreamError: As `_texts` does.
    """
    try:
        return await _texts(prompts, model)
    except BaseException:
        await choices.aclose()
        raise


async def _texts(prompts: Sequence[str | tuple[int, ...]], model: ServedModel) -> list[str]:
    """Return the texts of prompts, those of token ids from the replica.

    Raises:
        InvalidRequestError: The model knows no such token.
        RaystreamError: The replica can't be reached, or too many wait for its tokenizer.
    """

    async def text_of(prompt: str | tuple[int, ...]) -> str:
        return prompt if isinstance(prompt, str) else await model.backend.detokenize(prompt)

    try:
        return await asyncio.gather(*map(text_of, prompts))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, "prompt") from None


async def _completion(
    head: AnswerHead, choices: Choices, echoes: Sequence[str] | None
) -> Completion:
    tally = UsageTally(choices)
    answers = await choices.whole()
    for answer in answers:
        tally.add(answer)
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[
            _choice(
                index, answer, "" if echoes is None else echoes[index // choices.num_per_prompt]
            )
            for index, answer in enumerate(answers)
        ],
        usage=tally.usage(),
    )


def _choice(index: int, answer: Piece, echo: str) -> CompletionChoice:
    assert answer.finish_reason is not None, "`whole` returns finished texts alone"
    return CompletionChoice(
        index=index,
        text=echo + answer.text,
        logprobs=LogprobsWriter().tell(answer.logprobs) if answer.logprobs else None,
        finish_reason=answer.finish_reason,
    )
