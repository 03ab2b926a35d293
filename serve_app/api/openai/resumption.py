"""Streams that their clients can resume, through whichever ingress.

The answer is generated again from its start: the next token depends only on the tokens before it,
the request and (seed, position). It passes the very same writer, and what the client has got is
left out. Tokens may arrive in other groups than the first time, so what was sent is measured in
characters and marks, not in events; `ChoiceFramer.size` says how.

Each choice waits until all tokens that the client's part of it came from are there again, and their
checksum is compared, before anything of it is sent.
"""

import random
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, Protocol, Self, TypeVar

from starlette.datastructures import Headers

from deployments.contract.errors import AnswerChangedError, InvalidRequestError
from deployments.contract.output import TextDelta
from deployments.contract.sampling_params import MAX_SEED
from serve_app.api.openai.answer_schema import AnswerFields
from serve_app.backends.streams.choices import Choices
from serve_app.clock import Clock
from serve_app.config import MAX_NUM_CHOICES
from serve_app.http.request_record import RequestRecord, current_record
from serve_app.http.stream_notices import NOTICE_INTERVAL_S, resuming
from serve_app.streaming.event_id import (
    DIGEST_BYTES,
    LAST_EVENT_ID,
    EventId,
    EventIds,
    Mark,
    checksum,
)
from serve_app.streaming.event_stream import asks_for_events

FieldsT = TypeVar("FieldsT", bound=AnswerFields)

PROMPT_FIELDS: Final = {"messages", "prompt"}
"""The fields whose contents the replica's digest of the prompt covers, images included."""


class ChoiceFramer(Protocol):
    """Makes the choices of a surface's chunks."""

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the choice of a chunk before the first delta, or None."""
        ...

    def gain(self, index: int, delta: TextDelta) -> list[dict[str, Any]]:
        """Return what a delta adds to its choice, as the choices of zero or more chunks."""
        ...

    def size(self, choice: dict[str, Any]) -> int:
        """Return how much content a chunk's choice holds.

        That is its characters, and 1 for each mark: a role, the start of a call, a finish reason.
        However an answer's tokens are grouped, its sizes have the same sum; log-probabilities have
        none.
        """
        ...

    def behind(self, choice: dict[str, Any], size: int) -> dict[str, Any]:
        """Return what is left of a choice behind this much of it, which is less than its size."""
        ...

    def bare(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return a choice's log-probabilities without its content."""
        ...


@dataclass(frozen=True, slots=True)
class Resumable:
    """A streamed request whose events get ids.

    Attributes:
        body: The request as the client has sent it.
        seed: Its seed, or the one that was drawn for it.
        last: The id of the last event that the client has got; None if it has got none.
        clock: Times the notices.
    """

    body: AnswerFields
    seed: int
    last: EventId | None
    clock: Clock

    @classmethod
    def of(
        cls, body: AnswerFields, num_answers: int, headers: Headers, clock: Clock
    ) -> Self | None:
        """Return the request if its events get ids: it names event streams in `Accept`, or resumes.

        Args:
            body: The request.
            num_answers: How many choices it asks for.
            headers: Its headers.
            clock: Times the notices.

        Raises:
            InvalidRequestError: It can't be resumed as it is.
        """
        given = headers.get(LAST_EVENT_ID)
        if not given:
            wants_ids = body.stream and asks_for_events(headers)
            if not wants_ids or _obstacle(body, num_answers):
                return None
            return cls(body, _seed_of(body), None, clock)
        if not body.stream:
            raise InvalidRequestError(
                f"{LAST_EVENT_ID} resumes a stream. Send stream: true, or leave the header out.",
                LAST_EVENT_ID,
            )
        if obstacle := _obstacle(body, num_answers):
            raise InvalidRequestError(
                f"{LAST_EVENT_ID}: an answer {obstacle} can't be resumed. Leave the header out.",
                LAST_EVENT_ID,
            )
        last = EventId.decode(given)
        return cls(body, last.seed if body.seed is None else _seed_of(body), last, clock)

    @property
    def is_done(self) -> bool:
        """Whether the client has the whole answer."""
        return self.last is not None and self.last.mark is Mark.DONE

    def seeded(self, body: FieldsT) -> FieldsT:
        """Return the body with the seed, if it names none."""
        return body if body.seed is not None else body.model_copy(update={"seed": self.seed})

    async def begin(self, choices: Choices) -> "ResumableAnswer":
        """Return what numbers the events of the answer, and leaves out those that were sent.

        Raises:
            AnswerChangedError: The answer would be another one; the choices are closed.
        """
        digest = self._digest(choices)
        last = self.last
        if last is not None and (
            (last.seed, last.digest) != (self.seed, digest) or len(last.parts) > len(choices)
        ):
            await choices.aclose()
            raise AnswerChangedError(
                f"{LAST_EVENT_ID} is of another answer: the request differs from the one that the "
                "stream began with, or the server's model was replaced. Send the same request, or "
                "leave the header out to get a new answer.",
                LAST_EVENT_ID,
            )
        return ResumableAnswer(
            EventIds(self.seed, digest, len(choices), last), last, self.clock, current_record()
        )

    def _digest(self, choices: Choices) -> bytes:
        """Return a digest of what the answer depends on, but for the seed."""
        fields = self.body.model_dump_json(exclude=PROMPT_FIELDS)
        parts = (type(self.body).__name__, fields, choices.fingerprint or "")
        found = blake2b(digest_size=DIGEST_BYTES)
        for part in (*(part.encode() for part in parts), *choices.prompt_digests):
            found.update(blake2b(part).digest())  # of one length: none runs into another
        return found.digest()


class ResumableAnswer:
    """One answer whose events have ids.

    Attributes:
        ids: Gives each event its id.
        has_usage: Whether the client has the usage.
    """

    def __init__(
        self, ids: EventIds, last: EventId | None, clock: Clock, record: RequestRecord | None = None
    ) -> None:
        """Start before the answer.

        Args:
            ids: See the class.
            last: The id of the last event that the client has got; None if it has got none.
            clock: Times the notices.
            record: Takes the notices; None if nobody reads them.
        """
        self.ids = ids
        self.has_usage = last is not None and last.mark is Mark.USAGE
        self._known = dict(enumerate(() if last is None else last.parts))
        self._waiting: dict[int, list[TextDelta]] = {
            index: [] for index, part in self._known.items() if part.num_tokens
        }
        self._num_missing = {index: part.num_tokens for index, part in self._known.items()}
        self._sizes_left = {index: part.size for index, part in self._known.items() if part.size}
        self._num_known_tokens = sum(part.num_tokens for part in self._known.values())
        self._num_tokens = 0  # of what is known, generated again until now
        self._clock = clock
        self._told_s: float | None = None
        self._record = record

    def deltas(self, choices: Choices) -> AsyncGenerator[tuple[int, TextDelta], None]:
        """Yield each choice's deltas with its index; what the client knows is a delta by itself.

        Raises:
            AnswerChangedError: What the client has got came from other tokens.
            RaystreamError: See `Choices.deltas`.
        """
        return self._resumed(choices) if self._waiting else choices.deltas()

    async def _resumed(self, choices: Choices) -> AsyncGenerator[tuple[int, TextDelta], None]:
        self._tell()
        async with aclosing(choices.deltas()) as found:
            async for index, delta in found:
                if index not in self._waiting:
                    yield index, delta
                    continue
                for caught_up in self._catch_up(index, delta):
                    yield index, caught_up

    def _catch_up(self, index: int, delta: TextDelta) -> Iterator[TextDelta]:
        """Take a delta of what the client knows; yield all of that once it is complete."""
        waiting, part = self._waiting[index], self._known[index]
        waiting.append(delta)
        num_missing = self._num_missing[index]
        self._num_missing[index] -= len(delta.token_ids)
        self._note(min(num_missing, len(delta.token_ids)))
        if self._num_missing[index] > 0 and delta.finish_reason is None:
            return
        del self._waiting[index]
        known, new = _split(TextDelta.join(waiting), part.num_tokens)
        if (len(known.token_ids), checksum(known.token_ids)) != (part.num_tokens, part.checksum):
            raise self._changed()
        yield known
        if new is not None:
            yield new

    def _note(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if self._record is not None:
            self._record.regained(num_tokens)
        self._tell()

    def _tell(self) -> None:
        """Tell the client how far the answer is, but not too often."""
        now_s = self._clock.monotonic_s()
        if not self._waiting or self._record is None:
            return
        if self._told_s is None or now_s - self._told_s >= NOTICE_INTERVAL_S:
            self._told_s = now_s
            self._record.on_notice(resuming(self._num_tokens, self._num_known_tokens))

    def unsent(
        self,
        framer: ChoiceFramer,
        index: int,
        gained: list[dict[str, Any]],
        delta: TextDelta | None = None,
    ) -> list[dict[str, Any]]:
        """Return what the client has not got of the choices of chunks.

        Args:
            framer: What has made them.
            index: The choice's.
            gained: The choices.
            delta: What they come from; None for an opening.

        Raises:
            AnswerChangedError: The choice has ended before all that the client has got of it.
        """
        is_known = delta is not None and self.ids.gained(index, delta.token_ids)
        if not is_known and index not in self._sizes_left:
            return gained
        left, unsent = self._sizes_left.pop(index, 0), []
        for choice in gained:
            if is_known:
                choice["logprobs"] = None
            size = framer.size(choice)
            if size > left:
                unsent.append(framer.behind(choice, left) if left else choice)
            elif choice["logprobs"]:
                unsent.append(framer.bare(choice))  # its content was sent, they were not
            left = max(0, left - size)
        if left:
            if delta is not None and delta.finish_reason is not None:
                raise self._changed()
            self._sizes_left[index] = left
        return unsent

    def _changed(self) -> AnswerChangedError:
        error = AnswerChangedError(
            "The answer differs from the one that the stream began with, so it can't go on. Send "
            "the request again without Last-Event-ID."
        )
        if self._record is not None:
            self._record.failed(error.code)
        return error


def _obstacle(body: AnswerFields, num_answers: int) -> str | None:
    """Return what keeps the events of an answer from having ids, if anything does."""
    if num_answers > MAX_NUM_CHOICES:
        return f"of more than {MAX_NUM_CHOICES} choices"
    if body.num_prompt_logprobs_wanted is not None:
        return "with the log-probabilities of its prompt"
    return None


def _seed_of(body: AnswerFields) -> int:
    """Return a body's seed, or a random one; see `SamplingFields.to_sampling`."""
    return random.getrandbits(63) if body.seed is None else body.seed & MAX_SEED


def _split(joined: TextDelta, num_known: int) -> tuple[TextDelta, TextDelta | None]:
    """Return a delta in two: the first tokens, with all text; and the rest, if any.

    Only tokens and their log-probabilities can be told apart: the framer measures the text.
    """
    token_ids = joined.token_ids
    if len(token_ids) <= num_known and joined.finish_reason is None:
        return joined, None
    known = TextDelta(
        token_ids[:num_known],
        joined.text,
        logprobs=joined.logprobs[:num_known],
        num_cached_tokens=joined.num_cached_tokens,
    )
    new = replace(
        joined,
        token_ids=token_ids[num_known:],
        text="",
        logprobs=joined.logprobs[num_known:],
        num_cached_tokens=0,
    )
    return known, new
