"""`POST /v1/responses`: OpenAI's responses, streamed or whole, without a store."""

from typing import Final

from fastapi import APIRouter, Request

from serve_app.api.answers.stream import written_events
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.open_answer import open_answer
from serve_app.api.responses.answer import ResponseWriter, whole_response
from serve_app.api.responses.schema import ResponseBody, ResponsesEvent, ResponsesRequest
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of
from serve_app.http.route_docs import event_stream
from serve_app.streaming.event_id import refuse_last_event_id
from serve_app.streaming.event_stream import EventStreamResponse

_EXAMPLE: Final = (
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    '"sequence_number":4,"item_id":"item_1_0","output_index":0,"content_index":0,"delta":"Join",'
    '"logprobs":[]}\n\n'
)


class ResponsesApi:
    """Answers conversations as responses."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["responses"])
        router.add_api_route(
            "/v1/responses",
            self.create,
            methods=["POST"],
            summary="Answer a conversation as a response",
            response_model=ResponseBody,
            responses=event_stream(
                "The whole response; with stream: true, its events.", _EXAMPLE, ResponsesEvent
            ),
        )
        return router

    async def create(
        self, body: ResponsesRequest, request: Request
    ) -> ResponseBody | EventStreamResponse:
        """Answer with one response, whole or as a stream of events."""
        refuse_last_event_id(request.headers)
        return await self._context.answer(
            body.model,
            lambda: self._answer(body, request_id_of(request)),
            streams=bool(body.stream),
        )

    async def _answer(
        self, body: ResponsesRequest, request_id: str
    ) -> ResponseBody | EventStreamResponse:
        found = await open_answer(self._context, body, request_id)
        clock = self._context.clock
        model_id = found.model.description.id
        begun = ResponseBody.begin(f"resp_{request_id}", int(clock.unix_s()), model_id, body)
        if not body.stream:
            return await whole_response(begun, found, body.namespaced)
        events = written_events(found.choices, ResponseWriter(begun, found, body.namespaced))
        return EventStreamResponse(events, found.choices, sleep=clock.sleep)
