"""`/v1/batches`: OpenAI's batches. `serve_app.jobs.batch_runner` runs them."""

from typing import Annotated

from fastapi import APIRouter, Query, Request

from serve_app.api.batches.schema import BatchList, BatchObject, BatchRequest
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.job_lists import After, jobs_of, owner_of
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_record import record_of
from serve_app.jobs.batch import NewBatch
from serve_app.jobs.store import Page


class BatchesApi:
    """Takes batches, and shows how far they are."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(tags=["batches"])
        # Only this one has a body.
        bodies = APIRouter(route_class=JsonRoute, tags=["batches"])
        bodies.add_api_route(
            "/v1/batches",
            self.create,
            methods=["POST"],
            summary="Run the requests of a file",
            response_model=BatchObject,
        )
        router.routes += bodies.routes
        router.add_api_route("/v1/batches", self.list_batches, summary="List the batches")
        router.add_api_route("/v1/batches/{batch_id}", self.retrieve, summary="Show a batch")
        router.add_api_route(
            "/v1/batches/{batch_id}/cancel",
            self.cancel,
            methods=["POST"],
            summary="Cancel a batch",
        )
        return router

    async def create(self, body: BatchRequest, request: Request) -> BatchObject:
        """Run each line of a file as a request, on what others leave idle of the models.

        Each line is `{"custom_id": ..., "method": "POST", "url": ..., "body": {...}}`. Each gets
        one result, in the output file or the error file, in any order of running.
        """
        jobs = jobs_of(self._context)
        batch = await jobs.batches.create(
            NewBatch(
                owner_of(request),
                record_of(request.scope).standing.tenant,
                body.endpoint,
                body.input_file_id,
                body.completion_window,
                body.window_s,
                body.metadata,
            )
        )
        jobs.announce()
        return BatchObject.of(batch)

    async def list_batches(
        self,
        request: Request,
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> BatchList:
        """List the API key's batches, the newest first, a page at a time."""
        batches, has_more = await jobs_of(self._context).batches.page(
            owner_of(request), Page(after, limit)
        )
        return BatchList(
            data=[BatchObject.of(each) for each in batches],
            first_id=batches[0].id if batches else None,
            last_id=batches[-1].id if batches else None,
            has_more=has_more,
        )

    async def retrieve(self, batch_id: str, request: Request) -> BatchObject:
        """Show one batch, with the number of its lines that have a result."""
        jobs = jobs_of(self._context)
        return BatchObject.of(await jobs.batches.find(owner_of(request), batch_id))

    async def cancel(self, batch_id: str, request: Request) -> BatchObject:
        """End a batch; the results that its lines have got are kept."""
        jobs = jobs_of(self._context)
        batch = await jobs.batches.cancel(owner_of(request), batch_id)
        jobs.announce()
        return BatchObject.of(batch)
