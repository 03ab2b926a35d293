"""Matches chains of operators in a traced graph.

A pattern is an operator with a pattern for each argument. A name matches any argument, but the same
one wherever the name is repeated. Anything else matches only itself.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten

COMMUTATIVE = (aten.add.Tensor, aten.mul.Tensor)

INERT = frozenset({"device", "layout"})
"""Options of a cast that have no effect on a device by itself."""

Found = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Operator:
    """A pattern: a call of an operator.

    Attributes:
        target: The operator.
        arguments: A pattern for each argument.
        options: Keyword arguments, with their values.
    """

    target: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def match(self, node: torch.fx.Node) -> Found | None:
        """Return what the names match, or None if no such chain ends at the node."""
        return _match(self, node, {})


def _match(pattern: Any, value: Any, found: Found) -> Found | None:
    """Return `found` plus the names that the pattern adds, or None if it does not match."""
    if isinstance(pattern, str):
        if pattern in found:
            return found if found[pattern] is value or _equal(found[pattern], value) else None
        return {**found, pattern: value}
    if isinstance(pattern, Operator):
        return _match_operator(pattern, value, found)
    if isinstance(pattern, list):
        if not isinstance(value, list | tuple):
            return None
        return _match_all(pattern, value, found)
    return found if _equal(pattern, value) else None


def _match_operator(pattern: Operator, value: Any, found: Found) -> Found | None:
    if not isinstance(value, torch.fx.Node) or value.target is not pattern.target:
        return None
    options = {name: option for name, option in value.kwargs.items() if name not in INERT}
    if options != pattern.options:
        return None
    match = _match_all(pattern.arguments, value.args, found)
    if match is None and pattern.target in COMMUTATIVE:
        match = _match_all(pattern.arguments, value.args[::-1], found)
    return match


def _match_all(patterns: Any, values: Any, found: Found) -> Found | None:
    if len(patterns) != len(values):
        return None
    match: Found | None = found
    for pattern, value in zip(patterns, values, strict=True):
        match = None if match is None else _match(pattern, value, match)
    return match


def _equal(expected: Any, value: Any) -> bool:
    """Return whether literals are equal; nodes never are."""
    if isinstance(expected, torch.fx.Node) or isinstance(value, torch.fx.Node):
        return False
    return type(expected) is type(value) and bool(expected == value)
