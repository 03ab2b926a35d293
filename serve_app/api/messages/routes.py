"""`POST /v1/messages`: Anthropic's messages, streamed or whole; and the count of their tokens."""

from typing import Final

from fastapi import APIRouter, Request, Response

from serve_app.api.answers.stream import written_events
from serve_app.api.messages.answer import MessageWriter, whole_message
from serve_app.api.messages.schema import (
    Message,
    MessagesEvent,
    MessagesRequest,
    PromptFields,
    TokenCount,
)
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.open_answer import open_answer, tokenize
from serve_app.http.error_shapes import ANTHROPIC_ID_HEADER, ANTHROPIC_PATH, MessagesErrorBody
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of
from serve_app.http.route_docs import event_stream
from serve_app.streaming.event_id import refuse_last_event_id
from serve_app.streaming.event_stream import EventStreamResponse

_EXAMPLE: Final = (
    'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,"delta":'
    '{"type":"text_delta","text":"Join"}}\n\n'
    'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


class MessagesRoute(JsonRoute):
    """A route whose answers name the request's id as Anthropic's do."""

    async def answer(self, request: Request) -> Response:
        """Return the endpoint's answer; see `JsonRoute`."""
        answer = await super().answer(request)
        answer.headers[ANTHROPIC_ID_HEADER] = request_id_of(request)
        return answer


class MessagesApi:
    """Answers conversations in Anthropic's shape."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=MessagesRoute, tags=["messages"])
        router.add_api_route(
            ANTHROPIC_PATH,
            self.create,
            methods=["POST"],
            summary="Answer a conversation, in Anthropic's shape",
            response_model=Message,
            responses=event_stream(
                "The whole message; with stream: true, its events.",
                _EXAMPLE,
                MessagesEvent,
                MessagesErrorBody,
            ),
        )
        router.add_api_route(
            f"{ANTHROPIC_PATH}/count_tokens",
            self.count_tokens,
            methods=["POST"],
            summary="Count the tokens of a conversation",
        )
        return router

    async def create(
        self, body: MessagesRequest, request: Request
    ) -> Message | EventStreamResponse:
        """Answer with one message, whole or as a stream of events."""
        refuse_last_event_id(request.headers)
        return await self._context.answer(
            body.model,
            lambda: self._answer(body, request_id_of(request)),
            streams=bool(body.stream),
        )

    async def count_tokens(self, body: PromptFields) -> TokenCount:
        """Return the number of tokens that the model would read; nothing is generated."""
        context = self._context
        model = await context.models.find(body.model)
        found = await tokenize(context, body, model)
        return TokenCount(input_tokens=len(found.token_ids))

    async def _answer(
        self, body: MessagesRequest, request_id: str
    ) -> Message | EventStreamResponse:
        found = await open_answer(self._context, body, request_id)
        id_ = f"msg_{request_id}"
        if not body.stream:
            return await whole_message(id_, found, body.omits_thinking)
        writer = MessageWriter(id_, found, body.omits_thinking)
        events = written_events(found.choices, writer)
        return EventStreamResponse(events, found.choices, sleep=self._context.clock.sleep)
