"""Turns: models that share a device and don't all fit on it together take turns on it.

`policy` is asked by Serve's controller, `planner` says which models of a group have a turn, and
`holders` keeps what the replicas of a light group read. Serve copies this package by value into its
controller, so it imports nothing else of ours and nothing heavy.
"""

from deployments.turns.holders import read_holder
from deployments.turns.planner import (
    LONGEST_TURN_S,
    MAX_START_S,
    MIN_TURN_S,
    SHORTEST_TURN_S,
    SWAPS_IN_A_TURN,
    fit_together,
)
from deployments.turns.policy import TurnPolicy, parts_of

__all__ = [
    "LONGEST_TURN_S",
    "MAX_START_S",
    "MIN_TURN_S",
    "SHORTEST_TURN_S",
    "SWAPS_IN_A_TURN",
    "TurnPolicy",
    "fit_together",
    "parts_of",
    "read_holder",
]
