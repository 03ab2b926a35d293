"""TLS on the channel, with the certificates that Ray's own connections use.

Ray encrypts its connections if `RAY_USE_TLS` is set on every node. Both sides then show the
certificate of their node and accept only certificates of the cluster's authority.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of a node's certificate and key, and of the authority's certificate."""

    certificate: str
    key: str
    authority: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the files that Ray's variables name; None if Ray uses no TLS.

        Raises:
            KeyError: Ray uses TLS, but a variable is missing.
        """
        if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            return None
        return cls(
            environment["RAY_TLS_SERVER_CERT"],
            environment["RAY_TLS_SERVER_KEY"],
            environment["RAY_TLS_CA_CERT"],
        )

    def server_context(self) -> ssl.SSLContext:
        """Return what a replica uses: it asks each ingress for its certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        return self._load(context)

    def client_context(self) -> ssl.SSLContext:
        """Return what an ingress uses: the replica's certificate must name its address."""
        return self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context
