"""A clock that shows what a test has set it to."""


class HandClock:
    """Calling it reads it, in seconds."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
