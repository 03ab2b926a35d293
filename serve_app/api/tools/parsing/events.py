"""What a parser finds in an answer, piece by piece."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun: the function's name is known.

    Attributes:
        index: The call's place among those of the answer, from 0.
        name: One of the functions that were offered.
    """

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsGained:
    """More of the arguments' JSON, as the model wrote it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call is whole, and its arguments are an object in JSON."""

    index: int


@dataclass(frozen=True, slots=True)
class CallCut:
    """The call that had begun ends here, for the answer has come to its greatest length."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The call that had begun is none after all.

    Attributes:
        index: The call's.
        raw: All that the model wrote of it and that was told as a call; what follows comes as text.
    """

    index: int
    raw: str


Event = Text | CallStarted | ArgumentsGained | CallEnded | CallCut | CallBroken
