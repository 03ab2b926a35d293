"""Which replicas of a model have answered lately.

Ray tells its callers neither how many there are nor which one a call went to; the replicas do.
"""

MEMORY_S = 60.0
"""Serve stops replicas that are not needed, and nobody says goodbye."""


class KnownReplicas:
    """Remembers who has answered; the caller brings the time."""

    def __init__(self) -> None:
        """Know nobody."""
        self._heard_at_s: dict[str, float] = {}

    def note(self, replica_id: str, now_s: float) -> None:
        """Remember that a replica has answered."""
        self._heard_at_s[replica_id] = now_s

    def count(self, now_s: float) -> int:
        """Return how many have answered lately."""
        for replica_id in [r for r, at_s in self._heard_at_s.items() if now_s - at_s > MEMORY_S]:
            del self._heard_at_s[replica_id]
        return len(self._heard_at_s)
