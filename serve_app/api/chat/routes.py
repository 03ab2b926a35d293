"""`POST /v1/chat/completions`: OpenAI's chat completions, streamed or whole."""

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Final, Self

from fastapi import APIRouter, Request, Response

from serve_app.api.chat.answer import ChatFramer, whole_answer
from serve_app.api.chat.schema import ChatChunk, ChatCompletion, ChatRequest
from serve_app.api.openai.answer_stream import AnswerHead
from serve_app.api.requests.chunked_answer import ChunkedAnswer, answered
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.open_answer import open_answer
from serve_app.api.tools.offer import ToolOffer
from serve_app.http.json_route import JsonRoute
from serve_app.http.route_docs import event_stream

_EXAMPLE: Final = (
    'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"pydoc-chat",'
    '"choices":[{"index":0,"delta":{"content":"Join"},"logprobs":null,"finish_reason":null}]}\n\n'
    "data: [DONE]\n\n"
)


@dataclass(frozen=True, slots=True)
class OpenChat(ChunkedAnswer[ChatCompletion]):
    """The answers to a conversation.

    Attributes:
        offer: The functions that the model may call.
        num_prompt_logprobs: See `whole_answer`.
    """

    offer: ToolOffer
    num_prompt_logprobs: int | None

    @classmethod
    async def of(cls, context: ApiContext, body: ChatRequest, request_id: str) -> Self:
        """Open the streams.

        Raises:
            RaystreamError: The request was refused, or no replica could take it.
        """
        opened = await open_answer(context, body, request_id)
        head = AnswerHead.begin(
            f"chatcmpl-{request_id}", opened.model.description.id, opened.choices, context.clock
        )
        return cls(head, opened.choices, opened.reasoning, opened.offer, body.prompt_logprobs)

    def framer(self) -> ChatFramer:
        """Return what makes the choices of a stream's chunks."""
        return ChatFramer(self.offer, self.reasoning)

    def whole(self) -> Awaitable[ChatCompletion]:
        """Read the streams to their end, and return the whole answer; see `whole_answer`."""
        return whole_answer(
            self.head, self.choices, self.offer, self.reasoning, self.num_prompt_logprobs
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
        return await answered(self._context, body, request, "chat.completion.chunk", OpenChat.of)
