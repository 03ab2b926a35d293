r"""Translates the regular expressions of JSON schemas, those of ECMA-262, for Rust's regex crate.

The two differ in more than what they refuse: `[a&&b]`, `.`, `\s` and `\cA` mean something else in
Rust. So an expression is read here, by code points as with the flag `u`, and written again in forms
that both crates and readers agree on. What only expressions without `u` may hold (a `{` or `]` that
stands for itself, `\-`) means what it means there. Of what ECMA-262 refuses, the forms that Python,
Go and Rust share are read as these read them: `(?P<name>x)`, `(?i)x`, `\A`, `\z`, `\x{41}`, `\pL`.

Assertions and back-references are left out where the grammar can't follow them. Each only ever
forbids texts, so the rest of the expression holds.

Sources: https://tc39.es/ecma262/#sec-patterns,
https://tc39.es/ecma262/#sec-regular-expressions-patterns (Annex B),
https://docs.rs/regex/latest/regex/#syntax
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Final

LOOK_AROUND: Final = "look-around in patterns"
BACK_REFERENCES: Final = "back-references in patterns"
WORD_BOUNDARIES: Final = "word boundaries in patterns"
INNER_ANCHORS: Final = "anchors inside patterns"

MAX_NESTING: Final = 100
"""Most groups within groups; Rust's crate takes about twice as many."""
MAX_PAIRS: Final = 64
"""Most ranges that two sets of surrogates become, unless the second has all there are."""
MAX_REPETITIONS: Final = 2**31 - 1
"""No answer is as long as that, so that a larger maximum is none."""


class InvalidPatternError(ValueError):
    """An expression has no meaning in ECMA-262, or none that a grammar can hold."""


@dataclass(frozen=True, slots=True)
class RustPattern:
    """An expression for Rust's regex crate.

    Attributes:
        text: Matches what the original matches, and more only if something is left out.
        left_out: What is, as one of the names above each.
    """

    text: str
    left_out: frozenset[str] = frozenset()


def translated(pattern: str) -> RustPattern:
    """Return an expression of ECMA-262 as one of Rust's.

    Raises:
        InvalidPatternError: ECMA-262 refuses it, it is nested too deeply, or it asks for half a
            character.
    """
    reader = _Reader(pattern)
    branches = reader.branches(_Flags())
    if reader.at < len(pattern):
        raise reader.error("a group is closed that is not open")
    writer = _Writer()
    text = writer.branches(branches, _Edge.OPEN, _Edge.OPEN)
    return RustPattern(text, frozenset(reader.left_out | writer.left_out))


Range = tuple[int, int]

_LAST: Final = 0x10FFFF
_HIGH: Final = (0xD800, 0xDBFF)
_LOW: Final = (0xDC00, 0xDFFF)
_DIGITS: Final[list[Range]] = [(0x30, 0x39)]
_WORD: Final[list[Range]] = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE: Final[list[Range]] = [
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
]  # fmt: skip
_LINE_ENDS: Final[list[Range]] = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_CLASSES: Final = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS: Final = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13}

_QUANTIFIER: Final = re.compile(r"(?:[*+?]|\{(\d+)(,(\d*))?\})\??")
_PROPERTY: Final = re.compile(r"[pP](?:\{\^?[\w=]+\}|[A-Z])")
_CODE: Final = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|[ux]\{([0-9A-Fa-f]+)\}")
_LOW_CODE: Final = re.compile(r"\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})")
_OCTAL: Final = re.compile(r"[0-3][0-7]{0,2}|[4-7][0-7]?")
_REFERENCE: Final = re.compile(r"[1-9][0-9]*|k<[^>]*>")
_OPENING: Final = re.compile(
    r"\((?:\?(?:(?P<around><?[=!])|:|P?<(?P<name>[^\W\d][\w$]*)>"
    r"|(?P<reference>P=\w+\))|(?P<flags>[aimsu]*(?:-[ims]+)?)(?P<rest>[:)])))?"
)


@dataclass(frozen=True, slots=True)
class _Flags:
    ignores_case: bool = False
    any_line: bool = False
    dot_is_all: bool = False

    def changed(self, written: str) -> "_Flags":
        on, _, off = written.partition("-")
        made = self
        for letters, value in ((on, True), (off, False)):
            for letter, name in _FLAGS.items():
                if letter in letters:
                    made = replace(made, **{name: value})
        return made


_FLAGS: Final = {"i": "ignores_case", "m": "any_line", "s": "dot_is_all"}


@dataclass(frozen=True, slots=True)
class _Chars:
    """One character of a set."""

    ranges: Sequence[Range]
    properties: Sequence[str] = ()
    is_negated: bool = False
    ignores_case: bool = False

    def is_within(self, half: Range) -> bool:
        """Return whether all are halves of surrogate pairs, of the first or of the second kind."""
        is_plain = bool(self.ranges) and not self.properties and not self.is_negated
        return is_plain and all(half[0] <= a and b <= half[1] for a, b in self.ranges)


@dataclass(frozen=True, slots=True)
class _Anchor:
    is_end: bool


@dataclass(frozen=True, slots=True)
class _Anything:
    """Any text, in place of a back-reference."""


@dataclass(frozen=True, slots=True)
class _Group:
    branches: "list[list[_Node]]"


@dataclass(frozen=True, slots=True)
class _Repeated:
    node: "_Node"
    times: str


_Node = _Chars | _Anchor | _Anything | _Group | _Repeated


@dataclass(slots=True)
class _Reader:
    """Reads an expression from left to right."""

    pattern: str
    at: int = 0
    left_out: set[str] = field(default_factory=set)
    _depth: int = 0

    def error(self, why: str) -> InvalidPatternError:
        return InvalidPatternError(f"{why}, at character {self.at + 1}")

    def branches(self, flags: _Flags) -> list[list[_Node]]:
        """Read alternatives up to the end of their group."""
        found: list[list[_Node]] = [[]]
        while self.at < len(self.pattern) and self.pattern[self.at] != ")":
            if self.pattern[self.at] == "|":
                self.at += 1
                found.append([])
                continue
            if changed := self._flags_for_the_rest(flags):
                flags = changed
                continue
            self._read_term(found[-1], flags)
        return found

    def _flags_for_the_rest(self, flags: _Flags) -> _Flags | None:
        opening = _OPENING.match(self.pattern, self.at)
        if not opening or opening["rest"] != ")" or not opening["flags"]:
            return None
        self.at = opening.end()
        return flags.changed(opening["flags"])

    def _read_term(self, branch: list[_Node], flags: _Flags) -> None:
        begin = self.at
        node = self._atom(flags)
        after = node
        if isinstance(node, _Chars) and branch and isinstance(branch[-1], _Chars):
            pair = _joined(branch[-1], node)
            if pair is not None:
                branch.pop()
                after = pair
        times = _QUANTIFIER.match(self.pattern, self.at)
        if times is None:
            branch += [after] if after is not None else []
            return
        if isinstance(node, _Anchor):
            raise self.error("nothing can be repeated here")
        self.at = times.end()
        if _QUANTIFIER.match(self.pattern, self.at):
            raise self.error(f"{self.pattern[begin : self.at][:40]!r} can't be repeated")
        if after is not None:
            branch.append(_Repeated(after, self._times(times)))

    def _times(self, found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0][0]
        least, most = int(found[1]), int(found[3] or 0)
        if found[3] and most < least:
            raise self.error("the numbers of a repetition are out of order")
        if least > MAX_REPETITIONS:
            raise self.error("more repetitions than any answer has")
        if found[2] is None:
            return f"{{{least}}}"
        return f"{{{least},{most if found[3] and most <= MAX_REPETITIONS else ''}}}"

    def _atom(self, flags: _Flags) -> _Node | None:
        """Read what a quantifier may follow; None for what is left out and stands for no text."""
        char = self.pattern[self.at]
        if char == "(":
            return self._group(flags)
        if char == "[":
            return replace(self._set(), ignores_case=flags.ignores_case)
        if char == "\\":
            return self._escaped(flags)
        if _QUANTIFIER.match(self.pattern, self.at):
            raise self.error("nothing can be repeated here")
        self.at += 1
        match char:
            case "^" | "$" if flags.any_line:
                self.left_out.add(INNER_ANCHORS)
                return None
            case "^" | "$":
                return _Anchor(char == "$")
            case ".":
                return _Chars((), is_negated=True) if flags.dot_is_all else _DOT
            case _:
                return _Chars([(ord(char), ord(char))], ignores_case=flags.ignores_case)

    def _group(self, flags: _Flags) -> _Node | None:
        opening = _OPENING.match(self.pattern, self.at)
        if opening is None or self.pattern.startswith("?", opening.end()):
            raise self.error("a group that ECMA-262 does not have")
        self.at = opening.end()
        if opening["reference"]:
            self.left_out.add(BACK_REFERENCES)
            return _Anything()
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self.error(f"more than {MAX_NESTING} groups within groups")
        branches = self.branches(flags.changed(opening["flags"] or ""))
        if self.at == len(self.pattern):
            raise self.error("a group is not closed")
        self.at += 1
        self._depth -= 1
        if opening["around"]:
            self.left_out.add(LOOK_AROUND)
            return None
        return _Group(branches)

    def _escaped(self, flags: _Flags) -> _Node | None:
        """Read an escape outside of sets."""
        letter = self.pattern[self.at + 1 : self.at + 2]
        if letter in ("b", "B"):
            self.at += 2
            self.left_out.add(WORD_BOUNDARIES)
            return None
        # ECMA-262 refuses these with `u`, and no author means the letters.
        if letter and letter in "AzZ":
            self.at += 2
            return _Anchor(letter != "A")
        if reference := _REFERENCE.match(self.pattern, self.at + 1):
            self.at = reference.end()
            self.left_out.add(BACK_REFERENCES)
            return _Anything()
        return replace(self._escaped_chars(), ignores_case=flags.ignores_case)

    def _escaped_chars(self) -> _Chars:
        """Read an escape that stands for characters, within sets or outside."""
        self.at += 1
        if self.at == len(self.pattern):
            raise self.error("a backslash that escapes nothing")
        letter = self.pattern[self.at]
        if letter.lower() in _CLASSES:
            self.at += 1
            ranges = _CLASSES[letter.lower()]
            return _Chars(ranges if letter.islower() else _complement(ranges))
        if found := _PROPERTY.match(self.pattern, self.at):
            self.at = found.end()
            return _Chars((), (f"\\{found[0]}",))
        code = self._code()
        return _Chars([(code, code)])

    def _code(self) -> int:
        """Read the rest of an escape that stands for one character."""
        pattern, letter = self.pattern, self.pattern[self.at]
        if found := _CODE.match(pattern, self.at):
            self.at = found.end()
            code = int(found[1] or found[2] or found[3], 16)
            if code > _LAST:
                raise self.error("a character beyond Unicode")
            low = _LOW_CODE.match(pattern, self.at)
            if found[2] and low and _HIGH[0] <= code <= _HIGH[1]:
                self.at = low.end()
                return _pair(code, int(low[1], 16))
            return code
        if octal := _OCTAL.match(pattern, self.at):
            self.at = octal.end()
            return int(octal[0], 8)
        if letter == "c":
            control = pattern[self.at + 1 : self.at + 2]
            if control.isascii() and control.isalpha():
                self.at += 2
                return ord(control) % 32
            return ord("\\")
        self.at += 1
        return _CONTROLS.get(letter, ord(letter))

    def _set(self) -> _Chars:
        """Read a set; its operators are no others than ranges and the negation."""
        self.at += 1
        is_negated = self.pattern.startswith("^", self.at)
        self.at += is_negated
        ranges: list[Range] = []
        properties: list[str] = []
        while not self.pattern.startswith("]", self.at):
            first = self._member()
            is_range = self.pattern.startswith("-", self.at) and not self.pattern.startswith(
                "-]", self.at
            )
            if not is_range:
                ranges += first.ranges
                properties += first.properties
                continue
            self.at += 1
            last = self._member()
            if _is_one(first) and _is_one(last):
                if first.ranges[0][0] > last.ranges[0][0]:
                    raise self.error("a range that is out of order")
                ranges.append((first.ranges[0][0], last.ranges[0][0]))
            else:
                ranges += [*first.ranges, (ord("-"), ord("-")), *last.ranges]
                properties += [*first.properties, *last.properties]
        self.at += 1
        return _Chars(ranges, properties, is_negated)

    def _member(self) -> _Chars:
        if self.at >= len(self.pattern):
            raise self.error("a set is not closed")
        if self.pattern.startswith("\\b", self.at):
            self.at += 2
            return _Chars([(8, 8)])
        if self.pattern[self.at] == "\\":
            return self._escaped_chars()
        code = ord(self.pattern[self.at])
        self.at += 1
        return _Chars([(code, code)])


class _Edge(Enum):
    OPEN = auto()  # an anchor here is the expression's own
    ANCHORED = auto()  # an anchor is written already
    CLOSED = auto()  # there is text between, or there may be


class _Writer:
    """Writes what was read, with anchors only at the edges, where llguidance takes them."""

    def __init__(self) -> None:
        self.left_out: set[str] = set()

    def branches(self, branches: list[list[_Node]], start: _Edge, end: _Edge) -> str:
        return "|".join(self._branch(branch, start, end) for branch in branches)

    def _branch(self, branch: list[_Node], start: _Edge, end: _Edge) -> str:
        last = len(branch)
        while last and branch[last - 1] == _Anchor(is_end=True):
            last -= 1
        written: list[str] = []
        for at, node in enumerate(branch):
            if isinstance(node, _Anchor):
                edge = end if node.is_end and at >= last else start if not node.is_end else None
                if edge is _Edge.OPEN:
                    written.append("$" if node.is_end else "^")
                if edge not in (_Edge.OPEN, _Edge.ANCHORED):
                    self.left_out.add(INNER_ANCHORS)
                elif node.is_end:
                    end = _Edge.ANCHORED
                else:
                    start = _Edge.ANCHORED
                continue
            here = end if at == len(branch) - 1 else _Edge.CLOSED
            if at == last - 1 and last < len(branch):
                here = _Edge.ANCHORED if end is not _Edge.CLOSED else end
            written.append(self._node(node, start, here))
            start = _Edge.CLOSED
        return "".join(written)

    def _node(self, node: _Node, start: _Edge, end: _Edge) -> str:
        match node:
            case _Chars():
                return _written(node)
            case _Group():
                return f"(?:{self.branches(node.branches, start, end)})"
            case _Repeated():
                return self._node(node.node, _Edge.CLOSED, _Edge.CLOSED) + node.times
            case _:
                return "(?s:.*)"


_DOT: Final = _Chars(_LINE_ENDS, is_negated=True)


def _joined(first: _Chars, second: _Chars) -> _Chars | None:
    """Return the characters whose surrogate pairs two sets of halves make; None for other sets."""
    if not (first.is_within(_HIGH) and second.is_within(_LOW)):
        return None
    if [*_merged(second.ranges)] == [_LOW]:
        return _Chars([(_pair(a, _LOW[0]), _pair(b, _LOW[1])) for a, b in first.ranges])
    highs = [high for a, b in _merged(first.ranges) for high in range(a, b + 1)]
    lows = [*_merged(second.ranges)]
    if len(highs) * len(lows) > MAX_PAIRS:
        return None
    return _Chars([(_pair(high, a), _pair(high, b)) for high in highs for a, b in lows])


def _pair(high: int, low: int) -> int:
    return 0x10000 + (high - _HIGH[0] << 10) + low - _LOW[0]


def _is_one(chars: _Chars) -> bool:
    return not chars.properties and len(chars.ranges) == 1 and len({*chars.ranges[0]}) == 1


def _merged(ranges: Iterable[Range]) -> Iterator[Range]:
    begin = end = -2
    for first, last in sorted(ranges):
        if first > end + 1:
            if begin >= 0:
                yield begin, end
            begin, end = first, last
        end = max(end, last)
    if begin >= 0:
        yield begin, end


def _complement(ranges: Iterable[Range]) -> list[Range]:
    found = []
    begin = 0
    for first, last in _merged(ranges):
        if begin < first:
            found.append((begin, first - 1))
        begin = last + 1
    return [*found, (begin, _LAST)] if begin <= _LAST else found


def _written(chars: _Chars) -> str:
    """Return a set for Rust's crate, which knows no halves of surrogate pairs: no text has any."""
    outside = _complement([(_HIGH[0], _LOW[1])])
    kept = [
        (max(first, a), min(last, b))
        for first, last in _merged(chars.ranges)
        for a, b in outside
        if max(first, a) <= min(last, b)
    ]
    if not kept and not chars.properties:
        if chars.is_negated:
            return "(?s:.)"
        if chars.ranges:
            raise InvalidPatternError("half of a surrogate pair, which no text has")
        return rf"[^\x00-\x{{{_LAST:X}}}]"
    members = [_letter(a) if a == b else f"{_letter(a)}-{_letter(b)}" for a, b in kept]
    members += chars.properties
    is_bare = len(members) == 1 and not chars.is_negated and (not kept or len({*kept[0]}) == 1)
    text = members[0] if is_bare else f"[{'^' * chars.is_negated}{''.join(members)}]"
    return f"(?i:{text})" if chars.ignores_case else text


def _letter(code: int) -> str:
    char = chr(code)
    if char.isalnum() or char in " _<>":
        return char
    return f"\\{char}" if char.isascii() and char.isprintable() else f"\\x{{{code:X}}}"
