"""`POST /v1/chat/completions`: OpenAI's chat completions, streamed or whole."""

from http import HTTPStatus
from typing import Final

from fastapi import APIRouter, Request, Response

from serve_app.api.chat.answer import ChatFramer, whole_answer
from serve_app.api.chat.schema import ChatChunk, ChatCompletion, ChatRequest
from serve_app.api.intake.context import ApiContext
from serve_app.api.openai.answer_stream import AnswerHead, ChunkWriter, answer_events
from serve_app.api.openai.resumption import Resumable
from serve_app.api.reasoning.separation import Separation
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of
from serve_app.http.route_docs import event_stream
from serve_app.streaming.event_stream import EventStreamResponse

_EXAMPLE: Final = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"pydoc-chat",'
    '"choices":[{"index":0,"delta":{"content":"Join"},"logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)


class ChatApi:
    """Answers conversations."""

    def __init__(self, context: ApiContext) -> None:
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
            responses=event_stream(
                "The whole answer; with stream: true, its chunks as events.",
                _EXAMPLE,
                ChatChunk,
            ),
        )
        return router

    async def complete(self, body: ChatRequest, request: Request) -> ChatCompletion | Response:
        """Answer with one message or with n, whole or as a stream of chunks.

        With the id of an event in Last-Event-ID, send only what follows that event.
        """
        resumable = Resumable.of(body, body.n or 1, request.headers, self._context.clock)
        if resumable is not None and resumable.is_done:
            return Response(status_code=HTTPStatus.NO_CONTENT)
        return await self._context.answer(
            body.model, lambda: self._answer(body, request, resumable), streams=bool(body.stream)
        )

    async def _answer(
        self, body: ChatRequest, request: Request, resumable: Resumable | None
    ) -> ChatCompletion | EventStreamResponse:
        context, request_id = self._context, request_id_of(request)
        model = await context.models.find(body.model)
        prompt = await context.prompts.read(body.messages, model)
        offer = body.to_offer(context.limits, model.description)
        choices = await context.streams.open_choices(
            model,
            [prompt],
            body if resumable is None else resumable.seeded(body),
            request_id,
            body.n or 1,
            offer,
            body.to_template_kwargs(model.description),
            model.description.reasoning,
        )
        resumed = None if resumable is None else await resumable.begin(choices)
        reasoning = Separation.of(
            model.description, choices.reasoning, body.include_reasoning is not False
        )
        head = AnswerHead.begin(
            f"chatcmpl-{request_id}", model.description.id, choices, context.clock
        )
        if not body.stream:
            return await whole_answer(head, choices, offer, reasoning, body.prompt_logprobs)
        writer = ChunkWriter(head, "chat.completion.chunk", body.stream_options, choices, reasoning)
        events = answer_events(choices, ChatFramer(offer, reasoning), writer, resumed)
        return EventStreamResponse(events, choices, sleep=context.clock.sleep)
