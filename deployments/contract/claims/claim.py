"""What a request may claim of a replica, beside the requests of others."""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Claim:
    """Whose a request is, and how soon it should run.

    Attributes:
        priority: A lower one runs first, as vLLM's field of this name.
        tenant: The name of the API key, or what a trusted gateway says; empty without keys.
        weight: The tenant's share of a model, beside the other tenants'.
        waited_s: Seconds that the request has waited for its turn until now, at all replicas and
            parked. The ingress sets it for each call.
        num_served: Weighted tokens of this model that the ingress knows were served to the tenant.
            The ingress sets it for each call.
        ingress: Names that ingress. It sets it for each call.
        backlog: Numbers the time for which requests of the tenant have waited at that ingress
            without a break; see `Backlogs`. 0 says nothing of that.
    """

    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    waited_s: float = 0.0
    num_served: float = 0.0
    ingress: str = ""
    backlog: int = 0

    @property
    def queue(self) -> tuple[int, str]:
        """Priority and tenant: where these are the same, the older request goes first."""
        return self.priority, self.tenant


NO_CLAIM: Final = Claim()
"""That of a request that claims nothing beside others."""
