"""Which responses are stored, what they go on from, and how they get into the store."""

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from pydantic import TypeAdapter, ValidationError

from deployments.contract.errors import (
    InvalidRequestError,
    JobLimitError,
    JobsUnavailableError,
    PreviousResponseError,
    RaystreamError,
)
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.job_lists import owner_of
from serve_app.api.responses.answer import ResponseWriter
from serve_app.api.responses.answer_schema import ResponseBody
from serve_app.api.responses.input_schema import Input, InputItem
from serve_app.api.responses.schema import ResponsesRequest
from serve_app.http.request_id import request_id_of
from serve_app.http.request_record import note_warnings, record_of
from serve_app.jobs.conversations import PREVIOUS
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.responses import NewResponse
from serve_app.streaming.sse import LastEvent

INPUT: Final[TypeAdapter[list[InputItem]]] = TypeAdapter(Input)
ITEMS: Final = TypeAdapter(list[InputItem])


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a request's response.

    Attributes:
        id: The response's.
        body: The request, with the conversation that it goes on from.
        is_stored: Whether the response is stored.
        owner: Whose it is; see `jobs.store`.
        tenant: Whose the request is beside others; see `Standing`.
    """

    id: str
    body: ResponsesRequest
    is_stored: bool
    owner: str
    tenant: str

    @property
    def key(self) -> str:
        """The part of the id that names what is made of it."""
        return self.id.removeprefix("resp_")

    def row(self, response: ResponseBody) -> NewResponse:
        """Return what is stored of a response."""
        return NewResponse(
            self.id,
            self.owner,
            self.tenant,
            self.body.previous_response_id,
            response.status,
            dumped(self.body.input, self.key),
            response.model_dump_json(),
        )


class ResponseStoring:
    """Plans and stores responses."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    async def plan(self, body: ResponsesRequest, request: Request) -> Plan:
        """Return what becomes of a request's response.

        The id of one that is stored is random: no client can choose one that another has, or guess
        it.

        Raises:
            InvalidRequestError: It asks for what is not kept here.
            JobLimitError: It asks to be stored, and its owner has too many responses.
            JobsUnavailableError: It needs the store, which can't be used.
        """
        owner, jobs = owner_of(request), self._context.jobs
        is_line = "call" in request.scope["state"]
        if jobs is None:
            _refuse_without_store(body)
            is_stored = False
        else:
            is_stored = await self._is_stored(body, jobs, owner, is_line=is_line)
            if body.previous_response_id is not None:
                items = await jobs.conversations.up_to(
                    owner, body.previous_response_id, self._context.limits.max_body_bytes
                )
                body = following(body, items)
        if body.background and is_line:
            raise InvalidRequestError(
                "A batch runs in the background already: leave background out of its lines.",
                "background",
            )
        key = secrets.token_hex(24) if is_stored else request_id_of(request)
        tenant = record_of(request.scope).standing.tenant
        return Plan(f"resp_{key}", body, is_stored, owner, tenant)

    async def _is_stored(
        self, body: ResponsesRequest, jobs: Jobs, owner: str, *, is_line: bool
    ) -> bool:
        """Return whether a response is stored: without a word of the client's, only if it can be.

        A line of a batch is not, unless it says so: its answer is in the batch's file.
        """
        wants = body.store
        if wants is None:
            wants = jobs.config.store_responses_by_default and not is_line
        if body.background and not wants:
            raise InvalidRequestError(
                "background: true keeps the response until the client asks for it. Send "
                "store: true.",
                "store",
            )
        if not wants:
            return False
        try:
            await jobs.responses.require_room(owner)
        except (JobLimitError, JobsUnavailableError) as error:
            if body.store or body.background:
                raise
            _warn(error)
            return False
        return True

    async def keep(self, plan: Plan, response: ResponseBody) -> ResponseBody:
        """Store a response that has ended, if it is to be; return it, saying whether it is stored.

        Its answer is there, so it is not lost if the store fails.
        """
        if not plan.is_stored:
            return response
        assert self._context.jobs is not None, "nothing is stored without it"
        try:
            await self._context.jobs.responses.add(plan.row(response))
        except (JobsUnavailableError, PreviousResponseError) as error:
            _warn(error)
            return response.model_copy(update={"store": False})
        return response

    async def kept(
        self, plan: Plan, events: AsyncGenerator[bytes, None], writer: ResponseWriter
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a response, which is stored before its client gets the last one.

        So the client's next request finds it. One whose client leaves before is not stored.
        """
        async with aclosing(events):
            async for event in events:
                if isinstance(event, LastEvent) and not (await self.keep(plan, writer.ended)).store:
                    event = LastEvent(writer.ending_unstored())
                yield event


def following(body: ResponsesRequest, items: Sequence[dict[str, Any]]) -> ResponsesRequest:
    """Return a request with the conversation before it, as if the client had sent its items.

    Raises:
        InvalidRequestError: It has too many parts, or another raystream has stored it.
    """
    try:
        return body.after(INPUT.validate_python(items))
    except ValidationError as error:
        why = error.errors(include_url=False)[0]["msg"]
        raise InvalidRequestError(
            f"The conversation before this request can't be read: {why}", PREVIOUS
        ) from None


def dumped(items: Sequence[InputItem], key: str) -> str:
    """Return items in JSON, each with an id: the client's own, or a new one.

    Args:
        items: The items.
        key: The part of their response's id that names what is made of it.
    """
    named = [
        item if item.id else item.model_copy(update={"id": f"item_{key}_in_{at}"})
        for at, item in enumerate(items)
    ]
    return ITEMS.dump_json(named, exclude_none=True).decode()


def _refuse_without_store(body: ResponsesRequest) -> None:
    for field, other in ((PREVIOUS, "send the whole conversation"), ("background", "")):
        if getattr(body, field):
            way_out = f", or {other}" if other else ""
            raise InvalidRequestError(
                f"{field} needs stored responses, and this server keeps none. Name a folder on its "
                f"disk under jobs.folder in its configuration{way_out}.",
                field,
            )


def _warn(error: RaystreamError) -> None:
    note_warnings((f"The response is not stored: {error.message}",))
