"""Turns that some chat templates refuse, though the APIs allow them, and how they are put instead.

Templates want users and assistants to alternate, a user to begin, and one system turn before that,
or none. A probe for each kind of turns finds out at the start what a template wants. What differs
is joined or gets an empty turn in between. The order of the contents is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import groupby
from typing import Final, Literal

from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.generator.message_content import (
    FIRST,
    PROBE_CALL,
    PROBE_ID,
    PROBE_NAME,
    QUESTION,
    SECOND,
    TEXTS,
    shows_texts,
)

Turns = tuple[ChatMessage, ...]
Parts = tuple[TextPart | ImagePart, ...]

BETWEEN_TURNS: Final = "\n\n"
"""What stands between the texts of two turns that become one."""

FILLERS: Final = ("", ".")
"""The texts of a turn that only stands between two others, the first that a template takes."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Turns that some templates refuse.

    Attributes:
        probes: Conversations with such turns. Both texts of the probes are in each of them.
        put: Returns a conversation without such turns; the second argument is a filler.
        may_be_lost: Whether some templates drop a text of theirs in silence.
    """

    probes: tuple[Turns, ...]
    put: Callable[[Turns, str], Turns]
    may_be_lost: bool = False


@dataclass(frozen=True, slots=True)
class RefusedTurns:
    """What a template does not take, each in the order of `KINDS`.

    Attributes:
        dropped: Turns that it takes, and whose texts it leaves out of the prompt.
        refused: The turns for which it raises an error.
    """

    dropped: tuple[Kind, ...] = ()
    refused: tuple[Kind, ...] = ()


def find_refused(write: Callable[[Sequence[ChatMessage]], str]) -> RefusedTurns:
    """Return what a template does not take.

    Args:
        write: Returns a conversation's prompt; an empty text if the template fails.
    """
    dropped: list[Kind] = []
    refused: list[Kind] = []
    for kind in KINDS:
        prompts = [write(probe) for probe in kind.probes]
        if all(map(shows_texts, prompts)):
            continue
        (dropped if kind.may_be_lost and all(prompts) else refused).append(kind)
    return RefusedTurns(tuple(dropped), tuple(refused))


def put(turns: Sequence[ChatMessage], kinds: Sequence[Kind], filler: str) -> Turns:
    """Return a conversation without turns of these kinds.

    Args:
        turns: The conversation.
        kinds: What the template refuses, in the order of `KINDS`.
        filler: The text of turns that only stand between others.
    """
    return reduce(lambda told, kind: kind.put(told, filler), kinds, tuple(turns))


def _system_as_user(turns: Turns, _: str) -> Turns:
    return tuple(_as_user(turn) for turn in turns)


def _lone_system_as_user(turns: Turns, _: str) -> Turns:
    is_alone = all(turn.role == "system" for turn in turns)
    return tuple(map(_as_user, turns)) if is_alone else turns


def _later_system_as_user(turns: Turns, _: str) -> Turns:
    num_leading = _num_leading_systems(turns)
    return turns[:num_leading] + tuple(map(_as_user, turns[num_leading:]))


def _as_user(turn: ChatMessage) -> ChatMessage:
    return replace(turn, role="user") if turn.role == "system" else turn


def _num_leading_systems(turns: Turns) -> int:
    role, group = next(groupby(turns, _role), ("user", iter(())))
    return len(list(group)) if role == "system" else 0


def _role(turn: ChatMessage) -> str:
    return turn.role


def _joined(role: Literal["system", "user"], turns: Turns, _: str) -> Turns:
    """Return the turns, each run of this role as one."""
    told: list[ChatMessage] = []
    for turn in turns:
        if told and told[-1].role == turn.role == role:
            told[-1] = _join(told[-1], turn)
        else:
            told.append(turn)
    return tuple(told)


def _assistants_joined(turns: Turns, filler: str) -> Turns:
    """Return the turns, each run of the assistant as one, or parted by a user's filler.

    A template writes reasoning before text, and text before calls. Turns that would be read in
    another order if they were one stay two.
    """
    told: list[ChatMessage] = []
    for turn in turns:
        if not told or not told[-1].role == turn.role == "assistant":
            told.append(turn)
        elif _keeps_order(told[-1], turn):
            told[-1] = _join(told[-1], turn)
        else:
            told += _filled("user", filler), turn
    return tuple(told)


def _keeps_order(first: ChatMessage, second: ChatMessage) -> bool:
    if second.reasoning_content:
        return not (first.reasoning_content or first.parts or first.tool_calls)
    return not (first.tool_calls and second.parts)


def _join(first: ChatMessage, second: ChatMessage) -> ChatMessage:
    return replace(
        first,
        parts=_join_parts(first.parts, second.parts),
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning_content=first.reasoning_content or second.reasoning_content,
    )


def _join_parts(first: Parts, second: Parts) -> Parts:
    """Return the parts of both; texts that meet become one part, which templates can't trim."""
    if not (first and second):
        return first + second
    last, following = first[-1], second[0]
    if not (isinstance(last, TextPart) and isinstance(following, TextPart)):
        return first + second
    texts = [part.text for part in (last, following) if part.text]
    return (*first[:-1], TextPart(BETWEEN_TURNS.join(texts)), *second[1:])


def _parted(between: tuple[str, str], turns: Turns, filler: str) -> Turns:
    """Return the turns, with an assistant's filler between one of the first and of the second."""
    told: list[ChatMessage] = []
    for turn in turns:
        if told and (_place(told[-1]), turn.role) == between:
            told.append(_filled("assistant", filler))
        told.append(turn)
    return tuple(told)


def _place(turn: ChatMessage) -> str:
    return "calls" if turn.tool_calls else turn.role


def _begun_by_user(turns: Turns, filler: str) -> Turns:
    """Return the turns, with a user's filler before an assistant's that comes first."""
    at = _num_leading_systems(turns)
    if turns[at:] and turns[at].role == "assistant":
        return (*turns[:at], _filled("user", filler), *turns[at:])
    return turns


def _filled(role: Literal["user", "assistant"], filler: str) -> ChatMessage:
    return ChatMessage(role, (TextPart(filler),))


def _told(role: Literal["system", "user", "assistant"], *texts: str) -> ChatMessage:
    return ChatMessage(role, tuple(map(TextPart, texts)))


_RESULT: Final = ChatMessage("tool", (TextPart("."),), (), PROBE_ID, PROBE_NAME)
_ANSWER: Final = _told("assistant", ".")
_SYSTEM: Final = ChatMessage("system", TEXTS)
_USER: Final = ChatMessage("user", TEXTS)

KINDS: Final = (
    Kind(((_SYSTEM, QUESTION),), _system_as_user, may_be_lost=True),
    Kind(((_SYSTEM,),), _lone_system_as_user, may_be_lost=True),
    Kind(
        ((QUESTION, _SYSTEM, _ANSWER, QUESTION), (QUESTION, _ANSWER, _SYSTEM, QUESTION)),
        _later_system_as_user,
        may_be_lost=True,
    ),
    Kind(
        ((_told("system", FIRST), _told("system", SECOND), QUESTION),),
        partial(_joined, "system"),
        may_be_lost=True,
    ),
    Kind(
        ((_told("user", FIRST), _told("user", SECOND)),),
        partial(_joined, "user"),
        may_be_lost=True,
    ),
    Kind(
        ((QUESTION, _told("assistant", FIRST), _told("assistant", SECOND), QUESTION),),
        _assistants_joined,
        may_be_lost=True,
    ),
    Kind(((QUESTION, PROBE_CALL, _RESULT, _USER),), partial(_parted, ("tool", "user"))),
    Kind(((QUESTION, PROBE_CALL, _USER),), partial(_parted, ("calls", "user"))),
    Kind(((QUESTION, PROBE_CALL, _USER, _RESULT),), partial(_parted, ("user", "tool"))),
    Kind(((ChatMessage("assistant", TEXTS), QUESTION),), _begun_by_user),
)
"""All kinds, in the order of putting them: what becomes a user's turn may then be joined."""
