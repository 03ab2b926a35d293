"""What requests may claim of a model beside each other, and who is next by that."""

from deployments.contract.claims.backlogs import Backlogs
from deployments.contract.claims.claim import NO_CLAIM, Claim
from deployments.contract.claims.claim_queue import PRIORITY_AGING_S, ClaimQueue
from deployments.contract.claims.shares import FairShares, StreamCost, TenantService, cost

__all__ = [
    "NO_CLAIM",
    "PRIORITY_AGING_S",
    "Backlogs",
    "Claim",
    "ClaimQueue",
    "FairShares",
    "StreamCost",
    "TenantService",
    "cost",
]
