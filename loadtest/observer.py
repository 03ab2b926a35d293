"""Who is told of a run while it runs: the live display, or nobody.

The sending side calls these on its event loop, between two reads of a socket. So they only note
what they are told; drawing is done elsewhere, a few times a second. All times are those of
`record`: seconds of the run's clock.
"""

from typing import Protocol

from loadtest.record import RequestRecord


class Observer(Protocol):
    """Is told what happens, as it happens."""

    def level_started(
        self, title: str, now_s: float, *, num_requests: int | None, duration_s: float | None
    ) -> None:
        """Note that a level of the sweep begins.

        Args:
            title: What to call it, such as "8 queues" or "4 requests/s".
            now_s: When its first request can be sent.
            num_requests: How many it will send, warm-up left out; None if time decides.
            duration_s: How long it sends, from the end of warm-up; None if the count decides.
        """

    def started(self, now_s: float) -> None:
        """Note that a request is being sent."""

    def content(self, now_s: float, num_tokens: int, ttft_ms: float | None) -> None:
        """Note a content event.

        Args:
            now_s: When it was read.
            num_tokens: Its tokens as far as is known by now; 1 where only `usage` will tell.
            ttft_ms: For a request's first content event; None for the others.
        """

    def ended(self, record: RequestRecord) -> None:
        """Note that a request ended, well or not. Each that was started ends once."""


class SilentObserver:
    """Notes nothing: for runs that nobody watches."""

    def level_started(
        self, title: str, now_s: float, *, num_requests: int | None, duration_s: float | None
    ) -> None:
        """Ignore it."""

    def started(self, now_s: float) -> None:
        """Ignore it."""

    def content(self, now_s: float, num_tokens: int, ttft_ms: float | None) -> None:
        """Ignore it."""

    def ended(self, record: RequestRecord) -> None:
        """Ignore it."""
