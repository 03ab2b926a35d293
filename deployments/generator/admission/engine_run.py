"""One accepted sequence's way through the engine, which it may leave and enter again.

It keeps the token ids that have gone out, so a sequence that has left the engine goes on after them
when it enters again. What was under way in the engine meanwhile has not gone out, and is generated
again: it is the same, by (seed, position). So the ingress sees a pause. A sequence that finds no
turn again within `PARK_AFTER_S` is parked, if its ingress takes it back.
"""

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Final

from deployments.contract.errors import GenerationAbortedError, RaystreamError
from deployments.contract.generation import GenerationRequest
from deployments.contract.output import Delivered, FinishReason, TextDelta
from deployments.engine.scheduling.sequence import Beginning, SequenceRequest
from deployments.generator.text_engine import Take, TextEngine

if TYPE_CHECKING:
    from deployments.engine.grammar.matcher import TokenMatcher

PARK_AFTER_S: Final = 1.0
"""To come back into the same engine costs a prefill, most of which kept prefixes may save. Another
replica costs a whole one and a call, so a sequence first waits here for as long as a short answer
takes."""

PARKED: Final = TextDelta((), "", FinishReason.PARKED)
ABORTED: Final = TextDelta((), "", FinishReason.ABORT)


class EngineRun:
    """A sequence that an engine runs whenever it has its turn; see `permit.Run`."""

    def __init__(
        self,
        engine: TextEngine,
        request: GenerationRequest,
        sequence: SequenceRequest,
        take: Take,
        *,
        flush: Callable[[], None],
        on_begun: Callable[[], None],
        on_late: Callable[[], None],
    ) -> None:
        """Prepare a run; `enter` begins it.

        Args:
            engine: The engine.
            request: The request that asks for the sequence.
            sequence: The sequence, as the engine gets it at first.
            take: Takes its deltas, as of one run that was never interrupted.
            flush: Sends what `take` has taken; the engine's steps do so for what comes from it.
            on_begun: Called with the first delta after each time that it has entered the engine.
            on_late: Called when it has waited too long, and its ingress takes it back; again after
                as long if it is not parked then.
        """
        self._engine = engine
        self._request = request
        self._sequence = sequence
        self._take = take
        self._flush = flush
        self._on_begun = on_begun
        self._on_late = on_late
        self._inside = ExitStack()  # closing it takes the sequence out of the engine
        self._delivered = Delivered(sequence.generated_token_ids, sequence.num_prompt_logprobs)
        self._num_consumed = len(sequence.generated_token_ids)  # by the matcher
        self._beginnings = [Beginning()]  # of each stay in the engine; the last is of this one
        self._has_left = self._has_begun = self._is_over = False
        self._timer: asyncio.TimerHandle | None = None
        self.is_in = False

    @property
    def may_yield(self) -> bool:
        """Whether it may give its place to another; a suspect's probation goes on."""
        return not self._request.num_deaths and not self._is_over

    @property
    def is_parkable(self) -> bool:
        """Whether its ingress takes it back once it waits."""
        return self._request.is_parkable and not self._is_over

    @property
    def has_begun(self) -> bool:
        """Whether the engine has begun with it, since it entered; known before the first delta."""
        return self._has_begun or self._beginnings[-1].num_cached_tokens is not None

    @property
    def may_park(self) -> bool:
        """Whether it is parkable, and the engine has not begun with it."""
        return self.is_parkable and not self.has_begun

    def enter(self, *, goes_first: bool) -> None:
        """Go into the engine; if that has ended, so does the sequence, and it goes on elsewhere.

        Args:
            goes_first: Whether to go before others that wait in the engine and don't.
        """
        if self._is_over:
            return
        try:
            self._inside.enter_context(self._engine.running(self._rest(goes_first), self._gain))
        except RaystreamError as error:
            is_stopped = isinstance(error, GenerationAbortedError)
            self._end(TextDelta((), "", FinishReason.ABORT, None if is_stopped else error.message))
            return
        self._delivered.begin_run()
        self.is_in = True

    def leave(self) -> None:
        """Leave the engine; what was under way there is generated again."""
        if self.is_in:
            self.is_in, self._has_begun, self._has_left = False, False, True
            self._inside.close()
            self._beginnings.append(Beginning())

    def note_turn(self, *, is_running: bool) -> None:
        """Note whether it has its turn now; the wait for the next one is limited."""
        self._stop_timer()
        may_be_late = self._request.is_parked or self.is_in
        if not is_running and may_be_late and self._request.may_park:
            self._look_later()

    def park(self) -> None:
        """Leave for good: the ingress gets it back."""
        self._end(PARKED)

    def abort(self) -> None:
        """Leave for good: its ingress looks for another replica, as when this one is stopped."""
        self._end(ABORTED)

    def close(self) -> None:
        """Leave the engine, with nothing to follow."""
        self._is_over = True
        self._stop_timer()
        self.leave()

    def _end(self, last: TextDelta) -> None:
        if not self._is_over:
            self.close()
            self._take(last)
            self._flush()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if self.may_park:
            self._on_late()
            if not self._is_over:
                self._look_later()

    def _look_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(PARK_AFTER_S, self._look)

    def _rest(self, goes_first: bool) -> SequenceRequest:
        """Return the sequence with what has gone out of it."""
        matcher, beginning = self._copy_of_matcher(), self._beginnings[-1]
        if not self._has_left:
            return replace(
                self._sequence, matcher=matcher, goes_first=goes_first, beginning=beginning
            )
        return replace(
            self._sequence,
            # The engine may still hand over what the sequence gained before it left.
            sequence_id=self._engine.unique_id(self._request.request_id),
            generated_token_ids=tuple(self._delivered.token_ids),
            num_prompt_logprobs=self._delivered.num_prompt_logprobs,
            matcher=matcher,
            goes_first=goes_first,
            is_return=True,
            beginning=beginning,
        )

    def _copy_of_matcher(self) -> "TokenMatcher | None":
        """Return a matcher for the engine, which may let it consume more than goes out.

        It is copied, since to compile it again on the engine's thread would hold up all sequences.
        """
        matcher = self._sequence.matcher
        if matcher is None:
            return None
        token_ids = self._delivered.token_ids
        for token_id in islice(token_ids, self._num_consumed, None):
            matcher.advance(token_id)
        self._num_consumed = len(token_ids)
        return matcher.copy()

    @property
    def _num_cached_tokens(self) -> int | None:
        """What was cached when the engine first began; None if no engine has said so.

        Later it finds the sequence's own. The engine's thread may begin with a sequence that leaves
        at the same moment, so each stay is looked at again.
        """
        known = (each.num_cached_tokens for each in self._beginnings)
        return next((each for each in known if each is not None), None)

    def _gain(self, delta: TextDelta) -> None:
        """Pass a delta on, and remember it."""
        if not self._has_begun:
            self._has_begun = True
            self._stop_timer()
            self._on_begun()
        if delta.num_cached_tokens and (at_first := self._num_cached_tokens) is not None:
            delta = replace(delta, num_cached_tokens=min(at_first, delta.num_cached_tokens))
        if delta.finish_reason is not None:
            self._is_over = True
        self._take(self._delivered.add(delta))
