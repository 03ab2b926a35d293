"""Rewrites what llguidance would refuse, misread or not finish, so that as much as possible holds.

Generators write the limits of their types: integers of 64 bits, doubles, lengths of any size. A
limit that no answer reaches goes. A lower limit of -2^63 becomes the next one that llguidance can
hold, 1,024 above; everything else of the type stays possible. Patterns are read by ECMA-262, and
what older drafts spell in another way, and keywords that are null, as their authors mean them.

Where a value still can't be held, a strict schema gets a narrower one or is refused, so that every
answer is valid. A schema that is not strict does without the keyword, so that every valid answer is
possible, and the keyword is named.

Sources: llguidance's `parser/src/json/numeric.rs` and `schema.rs`, for the limits;
https://json-schema.org/draft/2020-12/json-schema-validation#section-6
"""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, TypeGuard

from serve_app.api.structured.ecma_pattern import InvalidPatternError, RustPattern, translated
from serve_app.api.structured.schema_walk import Schema, rebuilt, steps

INVALID_PATTERNS: Final = "patterns that ECMA-262 does not allow"
MAX_VALUE_LENGTH: Final = 40
"""Most characters of a value that are shown with its keyword."""

_LARGEST: Final = 2**63 - 1024
"""The largest number that is exact as a double and fits llguidance's integers."""
_LARGEST_DOUBLE: Final = 1.79e308
"""A limit from which on all doubles are within it: generators round the largest one."""
_LARGEST_OPEN: Final = 10**18 - 128
"""The largest limit beyond which llguidance lets numbers go on without end."""
_SMALLEST: Final = 1e-60
"""Closer to zero, a limit's digits are too many for llguidance's expressions."""
_MAX_SIZE: Final = 2**31 - 1
"""Lengths and counts beyond it are longer than any answer, and not all are read."""
_MAX_DIVISOR: Final = 20_000
_MAX_ROUND_DIVISOR: Final = 100
"""Larger divisors take too long to compile, except for such ones with zeros behind them."""

_SIZES: Final = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"
)  # fmt: skip
_NULLABLE: Final = frozenset({"const", "default", "example"})
"""Keywords that may be null."""
_DRAFTS: Final = ("draft-03", "draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
_KNOWN_DRAFTS: Final = frozenset(
    f"{scheme}://json-schema.org/{draft}/schema"
    for draft in _DRAFTS
    for scheme in ("http", "https")
)


class SchemaHolder:
    """Makes one schema fit for llguidance.

    Attributes:
        unheld: What was left out, in words.
        faults: Why, for a strict schema, which can't do without.
    """

    def __init__(self, *, is_strict: bool) -> None:
        """Hold a schema that is strict or not; see the module."""
        self.unheld: set[str] = set()
        self.faults: list[str] = []
        self._is_strict = is_strict

    def held(self, schema: Mapping[str, object]) -> dict[str, Any]:
        """Return the schema as llguidance takes it."""
        places = dict(_places_by_id(schema, "#"))

        def change(_: Schema, made: dict[str, Any]) -> dict[str, Any]:
            reference = made.get("$ref")
            if isinstance(reference, str) and reference in places:
                # In these drafts, a reference stands by itself.
                made = {k: v for k, v in made.items() if k == "required" and isinstance(v, bool)}
                return {**made, "$ref": places[reference]}
            return self._changed(made)

        made = rebuilt(schema, change)
        draft = made.get("$schema")
        if not isinstance(draft, str) or draft.rstrip("#") not in _KNOWN_DRAFTS:
            made.pop("$schema", None)
        return made

    def _changed(self, made: dict[str, Any]) -> dict[str, Any]:
        if not self._is_strict:
            made = {k: v for k, v in made.items() if v is not None or k in _NULLABLE}
            _read_older_drafts(made)
        for keyword in _SIZES:
            self._hold_size(made, keyword)
        for lower, upper, sign in (("minimum", "maximum", 1), ("maximum", "minimum", -1)):
            self._hold_bounds(made, lower, upper, sign)
        self._hold_divisor(made)
        self._hold_data(made)
        self._hold_pattern(made)
        self._hold_names(made)
        return made

    def _leave_out(self, made: dict[str, Any], keyword: str, *, shows_value: bool = True) -> None:
        value = json.dumps(made[keyword])
        named = f"{keyword} {value}" if len(value) <= MAX_VALUE_LENGTH else keyword
        if self._is_strict:
            self.faults.append(f"{named} can't be enforced")
            return
        self.unheld.add(named if shows_value else keyword)
        del made[keyword]

    def _hold_size(self, made: dict[str, Any], keyword: str) -> None:
        size = made.get(keyword, 0)
        if not _is_number(size) or not math.isfinite(size) or size != math.floor(size):
            # llguidance's refusal says what is wrong.
            if not self._is_strict:
                self._leave_out(made, keyword)
        elif keyword in made:
            made[keyword] = int(size)
            if keyword.startswith("max") and size > _MAX_SIZE:
                del made[keyword]
            elif size < 0 and keyword.startswith("min"):
                made[keyword] = 0
            elif not 0 <= size <= _MAX_SIZE:
                self._leave_out(made, keyword)

    def _hold_bounds(self, made: dict[str, Any], side: str, opposite: str, sign: int) -> None:
        """Hold the limits of one side; `sign` is -1 for the upper one, read as a lower one."""
        has_end = any(
            _is_number(value := made.get(each)) and abs(value) <= 2**63
            for each in (opposite, _exclusive(opposite))
        )
        for keyword in (side, _exclusive(side)):
            value = made.get(keyword)
            if keyword not in made or isinstance(value, bool):
                continue
            if not _is_number(value):
                if not self._is_strict:
                    self._leave_out(made, keyword)
                continue
            self._hold_bound(made, keyword, sign, has_end=has_end)
        if 0 < sign * _number(made.get(side)) < _SMALLEST:
            made[_exclusive(side)] = 0
            del made[side]

    def _hold_bound(self, made: dict[str, Any], keyword: str, sign: int, *, has_end: bool) -> None:
        bound = sign * made[keyword]
        if bound <= -_LARGEST_DOUBLE:
            del made[keyword]
        elif bound < -_LARGEST:
            fits = self._is_strict or bound >= -(2**63) - 1
            if not fits:
                self._leave_out(made, keyword)
            elif sign < 0 and _is_integer(made):
                # llguidance reads it as a double and ends at 2^63 - 1 by itself.
                made[keyword] = min(made[keyword], 2**63)
            else:
                made[keyword] = sign * -_LARGEST
        elif bound > (_LARGEST if has_end else _LARGEST_OPEN):
            self._leave_out(made, keyword)
        elif isinstance(bound, int):
            made[keyword] = sign * _inner_double(bound)
        elif 0 < bound < _SMALLEST and keyword.startswith("exclusive"):
            made[keyword] = 0

    def _hold_divisor(self, made: dict[str, Any]) -> None:
        if "multipleOf" in made and not self._is_strict and not _is_divisor(made["multipleOf"]):
            self._leave_out(made, "multipleOf")

    def _hold_data(self, made: dict[str, Any]) -> None:
        for keyword in ("const", "enum"):
            if keyword in made and not all(map(_is_exact, _integers(made[keyword]))):
                self._leave_out(made, keyword)

    def _hold_pattern(self, made: dict[str, Any]) -> None:
        if isinstance(made.get("pattern"), str):
            pattern = self._translated(made["pattern"])
            if pattern is None:
                del made["pattern"]
            else:
                made["pattern"] = pattern.text
                self._note(pattern.left_out)

    def _hold_names(self, made: dict[str, Any]) -> None:
        by_pattern = made.get("patternProperties")
        if not isinstance(by_pattern, Mapping):
            return
        patterns = {name: self._translated(name) for name in by_pattern}
        left_out = {each for p in patterns.values() if p is not None for each in p.left_out}
        texts = {name: p.text for name, p in patterns.items() if p is not None}
        if left_out or len({*texts.values()}) < len(patterns):
            # Names that a looser pattern also allows would have to fit its schema.
            self._note(left_out)
            open_names(made)
        else:
            made["patternProperties"] = {texts[name]: each for name, each in by_pattern.items()}

    def _note(self, left_out: frozenset[str] | set[str]) -> None:
        self.unheld |= left_out
        if self._is_strict:
            self.faults += [f"{each} can't be enforced" for each in sorted(left_out)]

    def _translated(self, pattern: str) -> RustPattern | None:
        try:
            return translated(pattern)
        except InvalidPatternError as error:
            self.unheld.add(INVALID_PATTERNS)
            self.faults.append(f"the pattern {pattern[:MAX_VALUE_LENGTH]!r} is not one: {error}")
            return None


def open_names(schema: dict[str, Any]) -> None:
    """Leave `patternProperties` out, so that properties of any name may have any value."""
    del schema["patternProperties"]
    schema["additionalProperties"] = True


def _exclusive(keyword: str) -> str:
    return f"exclusive{keyword.capitalize()}"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: object) -> int | float:
    return value if _is_number(value) else 0


def _is_integer(schema: Schema) -> bool:
    types = schema.get("type")
    return types == "integer" or (
        isinstance(types, list) and "integer" in types and "number" not in types
    )


def _inner_double(bound: int) -> int:
    """Return the double next to a lower limit that is not below it."""
    double = float(bound)
    return int(double if double >= bound else math.nextafter(double, math.inf))


def _is_divisor(value: object) -> bool:
    """Return whether llguidance reads a divisor exactly, and can count with it in time."""
    if not _is_number(value) or not 0 < abs(value) < 2**32:
        return False
    number = float(abs(value))
    num_digits = 0
    while number % 1:
        number *= 10
        num_digits += 1
    whole = int(number)
    if Fraction(whole, 10**num_digits) != Fraction(Decimal(repr(abs(value)))):
        return False
    return whole <= _MAX_DIVISOR or int(str(whole).rstrip("0")) <= _MAX_ROUND_DIVISOR


def _integers(data: object) -> Iterator[int]:
    if isinstance(data, Mapping):
        data = list(data.values())
    if isinstance(data, list):
        for each in data:
            yield from _integers(each)
    elif isinstance(data, int) and not isinstance(data, bool):
        yield data


def _is_exact(value: int) -> bool:
    """Return whether llguidance writes an integer as it is: it reads all numbers as doubles."""
    if abs(value) < 2**63:
        return value == 2**63 - 1 or (abs(value) <= _LARGEST and int(float(value)) == value)
    is_double = abs(value) <= sys.float_info.max and value != -(2**63)
    return is_double and Decimal(repr(float(value))) == value


def _read_older_drafts(made: dict[str, Any]) -> None:
    """Read draft 3, which Jackson writes: the type "any", and properties that say `required`."""
    types = made.get("type")
    if types == "any" or (isinstance(types, list) and "any" in types):
        del made["type"]
    properties = made.get("properties")
    if not isinstance(properties, Mapping):
        return
    for name, each in properties.items():
        if isinstance(each, dict) and isinstance(each.get("required"), bool):
            others = made.get("required", [])
            if each.pop("required") and isinstance(others, list) and name not in others:
                made["required"] = [*others, name]


def _places_by_id(schema: Schema, place: str) -> Iterator[tuple[str, str]]:
    """Yield the identifiers of draft 4 within a schema, each with the reference to its place."""
    if isinstance(schema.get("id"), str):
        yield schema["id"], place
    for keyword, value in schema.items():
        for step, each in steps(keyword, value):
            yield from _places_by_id(each, f"{place}/{step}")
