"""Whose a request is and how soon it may run, as its API key or a trusted gateway says.

The surfaces make the claim of a request from it, which travels to the replicas. See
`middleware.auth` and `middleware.gateway_headers`, which set it.
"""

from dataclasses import dataclass, replace
from typing import Final, Self

from deployments.contract.claims import Claim
from deployments.contract.errors import InvalidRequestError
from serve_app.config import ApiKey

GATEWAY: Final = "gateway:"
"""What a gateway's tenants begin with. No key's name has a colon, so none is taken for a key."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a request may claim.

    Attributes:
        tenant: Whose it is: the name of its API key, or `GATEWAY` and the gateway's fairness id; ""
            without both.
        weight: The tenant's share beside the others'.
        priority: The priority of a request that names none; lower runs first.
        best_priority: The best one that a request may name; None allows any.
        bound_by: What sets that bound, for the client to read.
    """

    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    best_priority: int | None = None
    bound_by: str = ""

    @classmethod
    def of_key(cls, key: ApiKey) -> Self:
        """Return the standing of the requests that an API key lets in."""
        best = key.priority if key.best_priority is None else key.best_priority
        return cls(key.name, key.weight, key.priority, best, f"The API key {key.name!r}")

    def of_tenant(self, fairness_id: str) -> Self:
        """Return the standing of a gateway's tenant."""
        return replace(self, tenant=GATEWAY + fairness_id)

    def with_objective(self, name: str, priority: int) -> Self:
        """Return the standing of a request with a gateway's objective, whatever the key says.

        Args:
            name: The objective's name.
            priority: Its priority, which is also the best that the request may name.
        """
        return replace(
            self,
            priority=priority,
            best_priority=priority,
            bound_by=f"The gateway's objective {name!r}",
        )

    def claim(self, priority: int | None) -> Claim:
        """Return what a request claims.

        Args:
            priority: The priority that the request names; None takes its standing's own.

        Raises:
            InvalidRequestError: It is better than the request may have.
        """
        if priority is None:
            priority = self.priority
        elif self.best_priority is not None and priority < self.best_priority:
            raise InvalidRequestError(
                f"{self.bound_by} allows the priority {self.best_priority} and higher numbers, "
                f"which run later; {priority} is refused.",
                "priority",
            )
        return Claim(priority, self.tenant, self.weight)


ANYONE: Final = Standing()
"""The standing where neither a key nor a gateway says anything: any priority, and one tenant."""
