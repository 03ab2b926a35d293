"""The interface of the live display to a run in progress.

The sender calls these methods on its event loop, between two reads of a socket. So they must only
store their arguments; drawing happens elsewhere, a few times a second. All times are seconds of the
run's clock.
"""

from typing import Protocol

from loadtest.results.record import RequestRecord


class Observer(Protocol):
    """Receives the events of a run as they happen."""

    def level_started(
        self, title: str, now_s: float, *, num_requests: int | None, duration_s: float | None
    ) -> None:
        """Record the start of a level.

        Args:
            title: The level's name, such as "8 queues" or "4 requests/s".
            now_s: When its first request can be sent.
            num_requests: The number of requests without warm-up; None if the duration decides.
            duration_s: How long requests are sent after warm-up; None if the count decides.
        """

    def started(self, now_s: float) -> None:
        """Record that a request is being sent."""

    def content(self, now_s: float, num_tokens: int | None, ttft_ms: float | None) -> None:
        """Record a content event.

        Args:
            now_s: When the event was read.
            num_tokens: Its tokens; None if only the record of the ended request will tell.
            ttft_ms: The request's TTFT, with its first content event; None for the others.
        """

    def ended(self, record: RequestRecord) -> None:
        """Record that a request ended, in success or error. Each request ends exactly once."""
