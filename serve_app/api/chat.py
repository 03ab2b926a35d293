"""`POST /v1/chat/completions`: OpenAI's main surface, streamed and whole."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from fastapi import APIRouter, Request

from deployments.errors import RaystreamError
from serve_app.api.chat_chunks import AnswerHead, ChatChunks
from serve_app.api.chat_deltas import finish_reason
from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.chat_schema import AnswerMessage, ChatCompletion, ChatRequest, Choice, Usage
from serve_app.api.context import ApiContext
from serve_app.api.errors import error_payload
from serve_app.api.json_route import JsonRoute
from serve_app.api.openapi import errors, event_stream
from serve_app.api.tool_offer import ToolOffer
from serve_app.api.tool_schema import AnswerToolCall
from serve_app.choices import Choices
from serve_app.event_stream import EventStreamResponse
from serve_app.generation import Piece
from serve_app.request_id import request_id_of
from serve_app.sse import DONE, encode_json

_EXAMPLE: Final = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"pydoc-chat",'
    '"choices":[{"index":0,"delta":{"content":"Join"},"logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)


class ChatApi:
    """Answers conversations."""

    def __init__(self, context: ApiContext) -> None:
        """Keep what every surface is given."""
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["chat"])
        router.add_api_route(
            "/v1/chat/completions",
            self.complete,
            methods=["POST"],
            summary="Answer a conversation",
            response_model=ChatCompletion,
            responses={
                **event_stream("The answer; with stream: true, its chunks as events.", _EXAMPLE),
                **errors(400, 404, 413, 415, 500, 503),
            },
        )
        return router

    async def complete(
        self, body: ChatRequest, request: Request
    ) -> ChatCompletion | EventStreamResponse:
        """Answer with a message, or with n of them, whole or as a stream of chunks."""
        model = await self._context.catalog.get(body.model)
        prompt = await self._context.to_messages(body.messages, model)
        request_id = request_id_of(request)
        offer = body.to_offer(self._context.limits, model.description)
        choices = await self._context.open_choices(
            model, prompt, body, request_id, body.n or 1, offer
        )
        created = int(self._context.clock.unix_s())
        head = AnswerHead(f"chatcmpl-{request_id}", created, body.model)
        if not body.stream:
            return await _completion(head, choices, offer)
        chunks = ChatChunks(head, body.stream_options, choices.num_prompt_tokens, offer)
        events = _events(chunks, choices)
        return EventStreamResponse(events, choices, sleep=self._context.clock.sleep)


async def _completion(head: AnswerHead, choices: Choices, offer: ToolOffer) -> ChatCompletion:
    answers = await choices.whole()
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[_choice(index, answer, offer) for index, answer in enumerate(answers)],
        usage=Usage.of(choices.num_prompt_tokens, sum(answer.num_tokens for answer in answers)),
    )


def _choice(index: int, answer: Piece, offer: ToolOffer) -> Choice:
    assert answer.finish_reason is not None, "`whole` returns finished texts alone"
    found = offer.read(answer.text)
    return Choice(
        index=index,
        message=AnswerMessage(
            content=None if found.calls and not found.text else found.text,
            tool_calls=[AnswerToolCall.of(call) for call in found.calls],
        ),
        logprobs=ChoiceLogprobs.of(answer.logprobs) if answer.logprobs else None,
        finish_reason=finish_reason(answer.finish_reason, has_called=bool(found.calls)),
    )


async def _events(chunks: ChatChunks, choices: Choices) -> AsyncGenerator[bytes, None]:
    for index in range(len(choices)):
        yield chunks.role(index)
    try:
        async with aclosing(choices.pieces()) as found:
            async for index, piece in found:
                if event := chunks.gain(index, piece):
                    yield event
    except RaystreamError as error:
        yield encode_json(error_payload(error))
        return
    if chunks.has_usage:
        yield chunks.usage()
    yield DONE
