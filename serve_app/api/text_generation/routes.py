"""`POST /text-generation`: the plain surface of the servers that raystream replaces."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime

from fastapi import APIRouter, Request

from deployments.contract.errors import RaystreamError
from serve_app.api.requests.context import ApiContext
from serve_app.api.requests.open_answer import open_answer
from serve_app.api.text_generation.schema import (
    TextGenerationAnswer,
    TextGenerationEvent,
    TextGenerationRequest,
)
from serve_app.backends.streams.choices import Choices
from serve_app.clock import Clock
from serve_app.http.json_route import JsonRoute
from serve_app.http.request_id import request_id_of
from serve_app.http.route_docs import event_stream
from serve_app.streaming.error_event import error_event
from serve_app.streaming.event_id import refuse_last_event_id
from serve_app.streaming.event_stream import EventStreamResponse
from serve_app.streaming.sse import DONE, encode_json

_EXAMPLE = (
    'data: {"text":"Join","token_count":1,"total_token_count":1,"token_rate":51.3}\n\n'
    "data: [DONE]\n\n"
)


class TokenMeter:
    """Counts tokens, and their rate since the meter was made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start_s = clock.monotonic_s()
        self.num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Count tokens."""
        self.num_tokens += num_tokens

    def rate(self) -> float:
        """Return tokens per second, rounded to a hundredth; 0 before any time has passed."""
        elapsed_s = self._clock.monotonic_s() - self._start_s
        return round(self.num_tokens / elapsed_s, 2) if elapsed_s > 0 else 0.0


class TextGenerationApi:
    """Generates text and reports its token counts."""

    def __init__(self, context: ApiContext) -> None:
        self._context = context

    def router(self) -> APIRouter:
        """Return the surface's routes."""
        router = APIRouter(route_class=JsonRoute, tags=["text generation"])
        router.add_api_route(
            "/text-generation",
            self.generate,
            methods=["POST"],
            summary="Generate text",
            response_model=TextGenerationAnswer,
            responses=event_stream(
                "A stream of events; with stream: false, the whole text as JSON.",
                _EXAMPLE,
                TextGenerationEvent,
            ),
        )
        return router

    async def generate(
        self, body: TextGenerationRequest, request: Request
    ) -> TextGenerationAnswer | EventStreamResponse:
        """Generate text from a prompt or messages, as a stream of events or whole."""
        refuse_last_event_id(request.headers)
        return await self._context.answer(
            body.model, lambda: self._generate(body, request), streams=body.stream is not False
        )

    async def _generate(
        self, body: TextGenerationRequest, request: Request
    ) -> TextGenerationAnswer | EventStreamResponse:
        clock = self._context.clock
        opened = await open_answer(self._context, body, request_id_of(request))
        meter = TokenMeter(clock)
        if body.stream is False:
            return await _answer(opened.choices, meter, clock)
        events = _events(opened.choices, meter)
        return EventStreamResponse(events, opened.choices, sleep=clock.sleep)


async def _answer(choices: Choices, meter: TokenMeter, clock: Clock) -> TextGenerationAnswer:
    (text,) = await choices.read_to_end()
    meter.add(len(text.token_ids))
    finished = datetime.fromtimestamp(clock.unix_s(), UTC)
    return TextGenerationAnswer(
        response=text.text,
        time=finished.isoformat(timespec="seconds"),
        token_count=meter.num_tokens,
        token_rate=meter.rate(),
    )


async def _events(choices: Choices, meter: TokenMeter) -> AsyncGenerator[bytes, None]:
    """Yield an event whenever there is text; tokens without text count in the next event."""
    num_reported = 0
    try:
        async with aclosing(choices.deltas()) as found:
            async for _, delta in found:
                meter.add(len(delta.token_ids))
                is_last_count = delta.finish_reason is not None and meter.num_tokens > num_reported
                if delta.text or is_last_count:
                    yield _event(delta.text, meter, num_reported)
                    num_reported = meter.num_tokens
    except RaystreamError as error:
        yield error_event(error)
        return
    yield DONE


def _event(text: str, meter: TokenMeter, num_reported: int) -> bytes:
    event = TextGenerationEvent(
        text=text,
        token_count=meter.num_tokens - num_reported,
        total_token_count=meter.num_tokens,
        token_rate=meter.rate(),
    )
    return encode_json(event.model_dump())
