"""Turns llguidance's messages, which are drawn over several lines, into one line for a client."""

import re
from typing import Final

MAX_LENGTH: Final = 500
MAX_SHOWN: Final = 80
"""Most characters of a faulty regular expression that are shown around the fault."""

# The parser of regular expressions shows the expression, marks of the place, and the error.
_REGEX: Final = re.compile(
    r"regex parse error:\n {4}(?P<shown>[^\n]*)\n {4}(?P<space> *)\^+ *\n(?:[^\n]*\n)*?"
    r"error: (?P<error>[^\n]*)"
)
_REGEX_ERROR: Final = re.compile(r"^error: (?P<error>[^\n]*)", re.MULTILINE)
_LOOK_AROUND: Final = re.compile(r"lookarounds not supported yet; \w+ in regex (?P<shown>[^\n]*)")
_PLACE: Final = re.compile(r"^(?:at )?(?P<line>\d+)\((?P<column>\d+)\): ")
_WHOLE_REGEX: Final = "at 1(8): invalid regex"
"""How faults of an expression begin that is not part of a client's rules."""
_LISTING: Final = re.compile(r"\s*(\d+ \|.*|\^+|<non-verbose/>)?\s*")


def readable(fault: str) -> str:
    """Return a message of llguidance in one line, without the listing of the source.

    For a regular expression, the line says what is wrong and where. For rules, it names the line
    and the column.
    """
    # The advice is about options that a client can't set.
    return _told(fault).partition(". Enable ")[0][:MAX_LENGTH]


def _told(fault: str) -> str:
    place = _PLACE.match(fault)
    where = f"line {place['line']}, column {place['column']}: " if place else ""
    if fault.startswith(_WHOLE_REGEX):
        where = ""
    if found := _REGEX.search(fault):
        return where + _at_character(found["error"], found["shown"], len(found["space"]))
    if found := _REGEX_ERROR.search(fault):
        return f"{where}regex parse error: {found['error']}"
    if found := _LOOK_AROUND.search(fault):
        shown = found["shown"][:MAX_SHOWN]
        return f"{where}word boundaries, and ^ or $ inside, are not supported in regex {shown}"
    rest = fault[place.end() :] if place else fault
    lines = [line.strip() for line in rest.splitlines() if not _LISTING.fullmatch(line)]
    # The vocabulary that grammars are tested with is not the model's.
    return where + " ".join(lines).partition("; following special tokens")[0]


def _at_character(error: str, shown: str, at: int) -> str:
    begin = max(0, at - MAX_SHOWN // 2)
    part = shown[begin : begin + MAX_SHOWN]
    return f"regex parse error: {error}, at character {at + 1}: {part}"
