"""`/v1/responses`: OpenAI's responses, streamed or whole, and the store of them.

A response that its client waits for is generated here. One in the background is queued, and run by
`serve_app.jobs.response_runner`. `GET /v1/responses` is the handshake of the WebSocket, whose
frames come as POSTs; see `serve_app.middleware.sockets`.
"""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from starlette import status
from starlette.responses import Response

from deployments.contract.errors import InvalidRequestError, UpgradeRequiredError
from serve_app.api.answers.stream import written_events
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.job_lists import After, Order, jobs_of, owner_of
from serve_app.api.requests.open_answer import open_answer
from serve_app.api.responses.answer import ResponseWriter, empty_response, whole_response
from serve_app.api.responses.answer_schema import ResponseBody, ResponsesEvent
from serve_app.api.responses.background import BackgroundResponses, NoStream, followed
from serve_app.api.responses.schema import ResponsesRequest
from serve_app.api.responses.sockets import HANDSHAKE, RequireRoom
from serve_app.api.responses.stored_schema import InputItemList, ResponseDeleted
from serve_app.api.responses.storing import Plan, ResponseStoring
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of
from serve_app.http.route_docs import event_stream
from serve_app.jobs.responses import StoredResponse
from serve_app.streaming.event_id import refuse_last_event_id
from serve_app.streaming.event_stream import EventStreamResponse

_EXAMPLE: Final = (
    'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",'
    '"sequence_number":4,"item_id":"item_1_0","output_index":0,"content_index":0,"delta":"Join",'
    '"logprobs":[]}\n\n'
)

MAX_EVENT: Final = 2**53

WARMS_UP: Final = "warms_up"
"""Set in the state of a POST that is a frame with `generate: false`: nothing is generated for it,
and the connection keeps its input for the next frame.
"""


class ResponsesApi:
    """Answers conversations as responses, and shows those that are stored."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context
        self._storing = ResponseStoring(context)

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["responses"])
        # Only this one has a body.
        bodies = APIRouter(route_class=JsonRoute, tags=["responses"])
        bodies.add_api_route(
            "/v1/responses",
            self.create,
            methods=["POST"],
            summary="Answer a conversation as a response",
            response_model=ResponseBody,
            responses=event_stream(
                "The whole response; with stream: true, its events.", _EXAMPLE, ResponsesEvent
            ),
        )
        router.routes += bodies.routes
        router.add_api_route(
            "/v1/responses", self.connect, methods=["GET"], include_in_schema=False
        )
        router.add_api_route(
            "/v1/responses/{response_id}",
            self.retrieve,
            summary="Show a stored response, or its events",
            response_model=ResponseBody,
            responses=event_stream(
                "The response; with stream=true, its events.", _EXAMPLE, ResponsesEvent
            ),
        )
        router.add_api_route(
            "/v1/responses/{response_id}",
            self.delete,
            methods=["DELETE"],
            summary="Erase a stored response",
        )
        router.add_api_route(
            "/v1/responses/{response_id}/cancel",
            self.cancel,
            methods=["POST"],
            summary="Cancel a response in the background",
            response_model=ResponseBody,
        )
        router.add_api_route(
            "/v1/responses/{response_id}/input_items",
            self.input_items,
            summary="List what a response's model has read",
        )
        return router

    async def connect(self, request: Request) -> Response:
        """Answer a handshake: 101 accepts it."""
        require_room: RequireRoom | None = getattr(request.state, HANDSHAKE, None)
        if require_room is None:
            raise UpgradeRequiredError(
                "GET /v1/responses speaks WebSocket: send the headers of its handshake, or "
                "POST /v1/responses."
            )
        require_room(request.headers)
        return Response(status_code=status.HTTP_101_SWITCHING_PROTOCOLS)

    async def create(
        self, body: ResponsesRequest, request: Request
    ) -> ResponseBody | EventStreamResponse:
        """Answer with one response, whole or as a stream of events, or queue it."""
        refuse_last_event_id(request.headers)
        if getattr(request.state, WARMS_UP, False):
            return await self._warm_up(body, request_id_of(request))
        plan = await self._storing.plan(body, request)
        if body.background:
            return await self._queue(plan)
        return await self._context.answer(
            body.model, lambda: self._answer(plan), streams=bool(body.stream)
        )

    async def _warm_up(self, body: ResponsesRequest, request_id: str) -> ResponseBody:
        """Return a response without output, if the model and the body are what a request needs."""
        model = await self._context.models.find(body.model)
        now_s = int(self._context.clock.unix_s())
        begun = ResponseBody.begin(f"resp_{request_id}", now_s, model.description.id, body)
        return empty_response(begun)

    async def _answer(self, plan: Plan) -> ResponseBody | EventStreamResponse:
        body, clock = plan.body, self._context.clock
        found = await open_answer(self._context, body, plan.key)
        model_id = found.model.description.id
        begun = ResponseBody.begin(
            plan.id, int(clock.unix_s()), model_id, body, is_stored=plan.is_stored
        )
        if not body.stream:
            response = await whole_response(begun, found, body.namespaced)
            return await self._storing.keep(plan, response)
        writer = ResponseWriter(begun, found, body.namespaced)
        events = written_events(found.choices, writer)
        if plan.is_stored:
            events = self._storing.kept(plan, events, writer)
        return EventStreamResponse(events, found.choices, sleep=clock.sleep)

    async def _queue(self, plan: Plan) -> ResponseBody | EventStreamResponse:
        jobs = jobs_of(self._context)
        begun = await BackgroundResponses(self._context, jobs).queue(plan)
        if not plan.body.stream:
            return begun
        return self._followed(plan.owner, plan.id, None)

    async def retrieve(
        self,
        response_id: str,
        request: Request,
        stream: Annotated[
            bool,
            Query(description="Whether to send the events of a response in the background."),
        ] = False,
        starting_after: Annotated[
            int | None,
            Query(
                ge=0,
                le=MAX_EVENT,
                description="With stream=true: the sequence_number of the last event that the "
                "client has.",
            ),
        ] = None,
    ) -> Response:
        """Show a stored response as it is now, or send its events, those to come included."""
        owner = owner_of(request)
        found = await jobs_of(self._context).responses.find(owner, response_id)
        if not stream:
            return _shown(found)
        if not found.is_background:
            raise InvalidRequestError(
                "Only a response with background: true keeps its events. Leave stream out.",
                "stream",
            )
        return self._followed(owner, response_id, starting_after)

    async def delete(self, response_id: str, request: Request) -> ResponseDeleted:
        """Erase a response from the disk; one in the background is aborted."""
        jobs = jobs_of(self._context)
        await jobs.responses.delete(owner_of(request), response_id)
        jobs.response_news.changed(response_id)
        return ResponseDeleted(id=response_id)

    async def cancel(self, response_id: str, request: Request) -> Response:
        """End a response in the background; one that has ended stays as it is."""
        jobs = jobs_of(self._context)
        cancelled = await jobs.responses.cancel(owner_of(request), response_id)
        jobs.response_news.changed(response_id)
        return _shown(cancelled)

    async def input_items(
        self,
        response_id: str,
        request: Request,
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Order = "desc",
    ) -> InputItemList:
        """List the items of a response's conversation, a page at a time."""
        jobs = jobs_of(self._context)
        items = await jobs.conversations.input_items(owner_of(request), response_id)
        if order == "desc":
            items.reverse()
        if after is not None:
            ids = [item.get("id") for item in items]
            if after not in ids:
                raise InvalidRequestError(f"There is no item {after!r}.", "after")
            items = items[ids.index(after) + 1 :]
        page = items[:limit]
        return InputItemList(
            data=page,
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=len(items) > limit,
        )

    def _followed(self, owner: str, id_: str, after: int | None) -> EventStreamResponse:
        events = followed(jobs_of(self._context), owner, id_, after)
        return EventStreamResponse(events, NoStream(), sleep=self._context.clock.sleep)


def _shown(response: StoredResponse) -> Response:
    return Response(response.told, media_type="application/json")
