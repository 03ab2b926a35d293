"""The events that a parser finds in an answer."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """Text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call has begun: the function's name is known.

    Attributes:
        index: The call's place among the calls of the answer, from 0.
        name: One of the offered functions.
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
    """The call is complete, and its arguments are a JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class CallCut:
    """The call is incomplete, because the answer was cut off."""

    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """The text that was reported as a call is not a call after all.

    Attributes:
        index: The call's index.
        raw: The model's text as far as it was reported as a call; the rest follows as text.
    """

    index: int
    raw: str


Event = Text | CallStarted | ArgumentsGained | CallEnded | CallCut | CallBroken
