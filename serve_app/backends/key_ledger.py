"""The key ledger as an ingress sees it: a Protocol, and Ray Serve's handle behind it."""

from typing import Protocol, cast

from serve_app.backends.replicas.handles import Handle, translated_errors
from serve_app.keys.ledger import Verdict


class Ledger(Protocol):
    """The key ledger, wherever it runs."""

    async def admit(self, name: str, ticket: str) -> Verdict:
        """Decide on a request; see `KeyLedger.admit`.

        Raises:
            RaystreamError: The ledger can't be reached.
        """
        ...

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        """Record the end of a request; see `KeyLedger.settle`.

        Raises:
            RaystreamError: The ledger can't be reached.
        """
        ...


class HandleLedger:
    """The key ledger behind a Ray Serve handle."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    async def admit(self, name: str, ticket: str) -> Verdict:
        """Ask the ledger; see `Ledger.admit`."""
        with translated_errors():
            return cast("Verdict", await self._handle.admit.remote(name, ticket))

    async def settle(self, name: str, ticket: str, num_tokens: int) -> None:
        """Tell the ledger; see `Ledger.settle`."""
        with translated_errors():
            await self._handle.settle.remote(name, ticket, num_tokens)
