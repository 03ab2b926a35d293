"""`POST /v1/chat/completions`: OpenAI's main surface, streamed and whole."""

from collections.abc import AsyncGenerator
from typing import Final

from fastapi import APIRouter, Request

from deployments.errors import RaystreamError
from serve_app.api.chat_chunks import AnswerHead, ChatChunks
from serve_app.api.chat_schema import AnswerMessage, ChatCompletion, ChatRequest, Choice, Usage
from serve_app.api.context import ApiContext
from serve_app.api.errors import error_payload
from serve_app.api.json_route import JsonRoute
from serve_app.api.openapi import errors, event_stream
from serve_app.backends import GenerationStream
from serve_app.event_stream import EventStreamResponse
from serve_app.generation import pieces, whole
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
        """Answer with one message, whole or as a stream of chunks."""
        model = await self._context.catalog.get(body.model)
        prompt = await self._context.to_messages(body.messages, model)
        request_id = request_id_of(request)
        stream = await self._context.open_stream(model, prompt, body, request_id)
        created = int(self._context.clock.unix_s())
        head = AnswerHead(f"chatcmpl-{request_id}", created, body.model)
        if not body.stream:
            return await _completion(head, stream)
        chunks = ChatChunks(head, body.stream_options, stream.num_prompt_tokens)
        return EventStreamResponse(_events(chunks, stream), stream, sleep=self._context.clock.sleep)


async def _completion(head: AnswerHead, stream: GenerationStream) -> ChatCompletion:
    answer = await whole(stream)
    message = AnswerMessage(content=answer.text)
    assert answer.finish_reason is not None, "`whole` returns finished texts alone"
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        choices=[Choice(message=message, finish_reason=answer.finish_reason)],
        usage=Usage.of(stream.num_prompt_tokens, answer.num_tokens),
    )


async def _events(chunks: ChatChunks, stream: GenerationStream) -> AsyncGenerator[bytes, None]:
    yield chunks.role()
    try:
        async for piece in pieces(stream):
            if event := chunks.gain(piece):
                yield event
    except RaystreamError as error:
        yield encode_json(error_payload(error))
        return
    if chunks.has_usage:
        yield chunks.usage()
    yield DONE
