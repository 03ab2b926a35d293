"""`POST /v1/chat/completions`: OpenAI's main surface, streamed and whole."""

from typing import Final

from fastapi import APIRouter, Request

from serve_app.access_log import note_finish
from serve_app.api.answer_stream import AnswerHead, ChunkWriter, answer_events
from serve_app.api.chat_chunks import ChatFramer
from serve_app.api.chat_deltas import finish_reason
from serve_app.api.chat_logprobs import ChoiceLogprobs
from serve_app.api.chat_schema import AnswerMessage, ChatCompletion, ChatRequest, Choice
from serve_app.api.chunk_schema import ChatChunk
from serve_app.api.context import ApiContext
from serve_app.api.json_route import JsonRoute
from serve_app.api.openapi import ANSWER_ERRORS, errors, event_stream
from serve_app.api.tool_offer import ToolOffer
from serve_app.api.tool_schema import AnswerToolCall
from serve_app.api.usage import UsageTally
from serve_app.choices import Choices
from serve_app.event_stream import EventStreamResponse
from serve_app.generation import Piece
from serve_app.request_id import request_id_of

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
                **event_stream(
                    "The answer; with stream: true, its chunks as events.", _EXAMPLE, ChatChunk
                ),
                **errors(*ANSWER_ERRORS),
            },
        )
        return router

    async def complete(
        self, body: ChatRequest, request: Request
    ) -> ChatCompletion | EventStreamResponse:
        """Answer with a message, or with n of them, whole or as a stream of chunks."""
        model = await self._context.find_model(body.model)
        prompt = await self._context.to_messages(body.messages, model)
        request_id = request_id_of(request)
        offer = body.to_offer(self._context.limits, model.description)
        choices = await self._context.open_choices(
            model, [prompt], body, request_id, body.n or 1, offer
        )
        head = self._context.answer_head(f"chatcmpl-{request_id}", body.model, model)
        if not body.stream:
            return await _completion(head, choices, offer)
        writer = ChunkWriter(head, "chat.completion.chunk", body.stream_options, choices)
        events = answer_events(choices, ChatFramer(offer), writer)
        return EventStreamResponse(events, choices, sleep=self._context.clock.sleep)


async def _completion(head: AnswerHead, choices: Choices, offer: ToolOffer) -> ChatCompletion:
    tally = UsageTally(choices)
    answers = await choices.whole()
    for answer in answers:
        tally.add(answer)
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[_choice(index, answer, offer) for index, answer in enumerate(answers)],
        usage=tally.usage(),
    )


def _choice(index: int, answer: Piece, offer: ToolOffer) -> Choice:
    assert answer.finish_reason is not None, "`whole` returns finished texts alone"
    found = offer.read(answer.text, is_cut=answer.finish_reason == "length")
    reason = finish_reason(answer.finish_reason, has_called=bool(found.calls))
    note_finish(reason)
    return Choice(
        index=index,
        message=AnswerMessage(
            content=None if found.calls and not found.text else found.text,
            tool_calls=[AnswerToolCall.of(call) for call in found.calls],
        ),
        logprobs=ChoiceLogprobs.of(answer.logprobs) if answer.logprobs else None,
        finish_reason=reason,
    )
