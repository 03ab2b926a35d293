"""Responses in the background: how they are queued, run and read by their events.

The log holds events, and what they were made of: the deltas of the answer, each as it came. An
ingress that takes a response over gives them to a writer again, which is then where the first one
was, and has the model go on behind their token ids. So every event is written once, and what
follows is what would have followed.
"""

import json
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from deployments.contract.errors import AnswerChangedError, RaystreamError
from deployments.contract.output import TextDelta
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.open_answer import open_answer
from serve_app.api.requests.stream_opener import Continuation
from serve_app.api.responses.answer import ResponseWriter, queued_events
from serve_app.api.responses.answer_schema import ResponseBody, ResponseFailure
from serve_app.api.responses.schema import ResponsesRequest
from serve_app.api.responses.storing import Plan, following
from serve_app.http.request_record import claim_of_request
from serve_app.jobs.jobs import Jobs
from serve_app.jobs.response_log import End, Group
from serve_app.jobs.response_runner import RunLog
from serve_app.jobs.responses import StoredResponse
from serve_app.streaming.error_event import error_event
from serve_app.streaming.sse import LastEvent, encode_typed

FOLLOW_S: Final = 0.1
"""How often a client's stream looks for new events, which another ingress may log."""

FOLLOW_HERE_S: Final = 1.0
"""How often it looks for them where this ingress logs them, which wakes the stream each time."""

FRAME_END: Final = "\n\n"


class NoStream:
    """What a stream of logged events closes: nothing is generated for it."""

    async def aclose(self) -> None:
        """Do nothing."""


class BackgroundResponses:
    """Queues responses, and makes their events."""

    def __init__(self, context: ApiContext, jobs: Jobs) -> None:
        self._context = context
        self._jobs = jobs

    async def queue(self, plan: Plan) -> ResponseBody:
        """Store a response that is to run, and return it.

        Raises:
            RaystreamError: The request is refused, as far as is known before a replica is asked.
            JobsUnavailableError: The store can't be written.
        """
        body, context = plan.body, self._context
        claim_of_request(body.asked_priority)
        model = await context.models.find(body.model)
        body.to_prompts(context.limits)
        body.to_offer(context.limits, model.description)
        begun = ResponseBody.begin(
            plan.id, int(context.clock.unix_s()), model.description.id, body, is_stored=True
        )
        events, num_events = queued_events(begun)
        asked = body.model_dump_json(by_alias=True, exclude_unset=True, exclude={"input"})
        row = replace(
            plan.row(begun),
            request=asked,
            seed=random.getrandbits(63),
            events=Group(0, num_events, events.decode(), "[]"),
        )
        await self._jobs.responses.add(row)
        self._jobs.response_news.changed(plan.id)
        return begun

    async def answer(self, response: StoredResponse, groups: list[Group], log: RunLog) -> None:
        """Generate a response to its end; see `response_runner.Answers`.

        Raises:
            RaystreamError: The request was refused, or the answer can't go on behind its events.
            LeaseLostError, JobsUnavailableError: See `RunLog.end`.
        """
        body = await self._asked(response)
        known = [each for group in groups for each in json.loads(group.replay) if each]
        deltas = [_delta(each) for each in known if "text" in each]
        fingerprint = next((each["fingerprint"] for each in known if "fingerprint" in each), None)
        token_ids = tuple(token_id for delta in deltas for token_id in delta.token_ids)
        opened = await open_answer(
            self._context,
            body,
            response.id.removeprefix("resp_"),
            Continuation(response.seed, token_ids, fingerprint),
        )
        begun = ResponseBody.model_validate_json(response.body)
        writer = ResponseWriter(
            begun.model_copy(update={"status": "in_progress"}),
            opened,
            body.namespaced,
            num_told=groups[0].num_events,
            # The same ids for whichever ingress writes the events.
            draw=random.Random(response.id).choice,
        )
        async with aclosing(opened.choices):
            if known:
                _replay(writer, groups, deltas)
            else:
                opening = writer.opening()
                _log(log, writer, opening, {"fingerprint": opened.choices.fingerprint})
            try:
                async with aclosing(opened.choices.deltas()) as found:
                    async for _, delta in found:
                        _log(log, writer, writer.gain(delta), _replayed(delta))
            except RaystreamError as error:
                last = writer.failure(error)
            else:
                last = writer.ending()
        end = End(writer.ended.status, writer.ended.model_dump_json())
        await log.end(last, writer.num_events - log.num_events, end)

    async def fail(self, response: StoredResponse, log: RunLog, message: str) -> None:
        """End a response with an error; see `response_runner.Answers`."""
        begun = ResponseBody.model_validate_json(response.body)
        failure = ResponseFailure(message=message)
        failed = begun.model_copy(update={"status": "failed", "error": failure})
        event = {
            "type": "response.failed",
            "sequence_number": log.num_events,
            "response": failed.model_dump(),
        }
        await log.end(encode_typed(event), 1, End("failed", failed.model_dump_json()))

    async def _asked(self, response: StoredResponse) -> ResponsesRequest:
        """Return the request for a response, with the conversation before it.

        Raises:
            PreviousResponseError: A response before it was erased.
            JobsUnavailableError: The store can't be read.
        """
        assert response.request is not None, "it has not ended"
        fields = {**json.loads(response.request), "input": json.loads(response.items)}
        body = ResponsesRequest.model_validate(fields)
        if body.previous_response_id is None:
            return body
        before = await self._jobs.conversations.before(response.owner, response.id)
        return following(body, before)


async def followed(
    jobs: Jobs, owner: str, id_: str, after: int | None
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a response in the background, as they are logged, up to its end.

    Args:
        jobs: The responses.
        owner: The response's.
        id_: The response's.
        after: The number of the last event that the client has; None if it has none.
    """
    last = -1 if after is None else after
    is_here = False
    with jobs.response_news.of_log(id_) as news:
        try:
            while True:
                groups, has_ended = await jobs.response_log.events(owner, id_, last)
                for group in groups:
                    frames = group.events.removesuffix(FRAME_END).split(FRAME_END)
                    new = frames[max(0, last + 1 - group.first) :]
                    last = group.first + group.num_events - 1
                    yield (FRAME_END.join(new) + FRAME_END).encode()
                if has_ended:
                    return
                if not groups:
                    is_here = await news.wait(FOLLOW_HERE_S if is_here else FOLLOW_S)
        except RaystreamError as error:
            yield LastEvent(error_event(error))


def _replay(writer: ResponseWriter, groups: list[Group], deltas: list[TextDelta]) -> None:
    """Bring a writer to where another has stopped.

    Raises:
        AnswerChangedError: It writes other events: another raystream has logged them.
    """
    written = [writer.opening(), *map(writer.gain, deltas)]
    logged = "".join(group.events for group in groups[1:])
    if b"".join(written).decode() != logged:
        raise AnswerChangedError(
            "The response can't go on: another version of the server has begun it. Ask again."
        )


def _log(log: RunLog, writer: ResponseWriter, events: bytes, replay: dict[str, Any]) -> None:
    log.add(events, writer.num_events - log.num_events, replay)


def _replayed(delta: TextDelta) -> dict[str, Any]:
    """Return what the log keeps of a delta."""
    return {"ids": delta.token_ids, "text": delta.text, "cached": delta.num_cached_tokens}


def _delta(kept: dict[str, Any]) -> TextDelta:
    return TextDelta(tuple(kept["ids"]), kept["text"], num_cached_tokens=kept["cached"])
