"""Fetches images at `https:` URLs, only from the hosts that serve_config.yaml lists.

A server that fetches URLs chosen by clients can be turned against its own network. Hence these
rules. Only one parser reads the URL, and only its result is used. The host is looked up once, every
address found must be public, and the connection goes to those addresses, while TLS still verifies
the name. Redirects are not followed. Proxies, cookies and compression are off. Bytes and time are
bounded. Clients are not told why a fetch failed: that would map the network for them.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Final, Protocol

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from deployments.contract.errors import InvalidImageError
from serve_app.config import LimitsConfig

_NAT64: Final = IPv6Network("64:ff9b::/96")
_HEADERS: Final = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "raystream"}
_CHUNK_BYTES: Final = 65536
MAX_URL_LENGTH: Final = 2048
MAX_CONCURRENT_FETCHES: Final = 16

IsAllowed = Callable[[str], bool]


class ImageSource(Protocol):
    """A source of the images behind URLs."""

    async def fetch_all(self, urls: Mapping[str, str]) -> dict[str, bytes]:
        """Return the encoded image behind each URL.

        Args:
            urls: Each URL with the parameter that holds it, for error messages.

        Raises:
            InvalidImageError: A URL is not allowed, or its image can't be fetched.
        """
        ...


class NonPublicAddressError(OSError):
    """A host's name resolves to an address outside the public network."""


def is_public(address: str) -> bool:
    """Return whether an address, and any address embedded in it, is public.

    Source: https://www.iana.org/assignments/iana-ipv6-special-registry
    """
    ip = ip_address(address.partition("%")[0])
    return all(
        one.is_global and not (one.is_multicast or one.is_reserved or one.is_unspecified)
        for one in _with_embedded(ip)
    )


def _with_embedded(ip: IPv4Address | IPv6Address) -> Sequence[IPv4Address | IPv6Address]:
    """Return the addresses to check: also an embedded IPv4 address, or only that if mapped."""
    if isinstance(ip, IPv4Address):
        return (ip,)
    if ip.ipv4_mapped:
        return (ip.ipv4_mapped,)
    if ip in _NAT64:
        return (IPv4Address(int(ip) & 0xFFFFFFFF),)
    if ip.sixtofour:
        return (ip, ip.sixtofour)
    return (ip, *ip.teredo) if ip.teredo else (ip,)


class PinnedResolver(AbstractResolver):
    """Looks a host up, and returns only allowed addresses.

    aiohttp connects to the addresses returned here and looks up nothing itself.
    """

    def __init__(self, resolver: AbstractResolver, is_allowed: IsAllowed = is_public) -> None:
        self._resolver = resolver
        self._is_allowed = is_allowed

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Return the host's addresses.

        Raises:
            NonPublicAddressError: One of them is not allowed; then none is used.
            OSError: The host is unknown.
        """
        found = await self._resolver.resolve(host, port, family)
        if not all(self._is_allowed(result["host"]) for result in found):
            raise NonPublicAddressError(f"{host} has an address that is not public")
        return found

    async def close(self) -> None:
        """Close the resolver that asks the network."""
        await self._resolver.close()


class ImageFetcher:
    """Fetches images while a request waits.

    Each request gets a session of its own: nothing is kept between requests.
    """

    def __init__(
        self,
        limits: LimitsConfig,
        resolver: Callable[[], AbstractResolver] = aiohttp.ThreadedResolver,
        is_allowed: IsAllowed = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Prepare to fetch; no connection is made yet.

        Args:
            limits: Allowed hosts, most bytes and most seconds.
            resolver: Makes the resolver that asks the network.
            is_allowed: Returns whether an address may be connected to.
            tls: The certificates to trust; None trusts the machine's own.
        """
        self._limits = limits
        self._resolver = resolver
        self._is_allowed = is_allowed
        self._tls = tls
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_FETCHES)

    async def fetch_all(self, urls: Mapping[str, str]) -> dict[str, bytes]:
        """Return the images; see `ImageSource.fetch_all`."""
        parsed = {url: self._parse(url, param) for url, param in urls.items()}
        if not parsed:
            return {}
        async with self._session() as session:
            return await self._fetch_parsed(session, parsed, urls)

    async def _fetch_parsed(
        self, session: aiohttp.ClientSession, parsed: Mapping[str, URL], params: Mapping[str, str]
    ) -> dict[str, bytes]:
        """Fetch all images concurrently; the first failure cancels the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = {
                    text: group.create_task(self._fetch(session, url, params[text]))
                    for text, url in parsed.items()
                }
        except* InvalidImageError as errors:
            raise errors.exceptions[0] from None
        return {text: task.result() for text, task in tasks.items()}

    def _parse(self, text: str, param: str) -> URL:
        try:
            url = URL(text) if len(text) <= MAX_URL_LENGTH else URL()
        except ValueError:
            url = URL()
        is_plain = url.scheme == "https" and url.raw_user is None and url.raw_password is None
        # `raw_host` is the host as sent over the wire; its decoded form might not even exist.
        if is_plain and url.port == 443 and url.raw_host in self._limits.allowed_image_domains:
            return url
        how = (
            "or https: URLs of hosts in limits.allowed_image_domains."
            if self._limits.allowed_image_domains
            else "since limits.allowed_image_domains is empty."
        )
        raise InvalidImageError(
            f"Images are not fetched from this URL. Send base64 data: URIs, {how}", param
        )

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            resolver=PinnedResolver(self._resolver(), self._is_allowed),
            use_dns_cache=False,
            force_close=True,
            ssl=True if self._tls is None else self._tls,
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def _fetch(self, session: aiohttp.ClientSession, url: URL, param: str) -> bytes:
        timeout_s = self._limits.image_fetch_timeout_s
        try:
            # The timeout covers everything; aiohttp's own would leave out the wait for a slot.
            async with (
                asyncio.timeout(timeout_s),
                self._slots,
                session.get(url, allow_redirects=False) as answer,
            ):
                if answer.status != 200:
                    raise _unreachable(param)
                return await self._read(answer, param)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            raise _unreachable(param) from None

    async def _read(self, answer: aiohttp.ClientResponse, param: str) -> bytes:
        limit = self._limits.max_image_bytes
        data = bytearray()
        async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
            data += chunk
            if len(data) > limit:
                raise InvalidImageError(
                    f"The image has more than {limit} bytes (limits.max_image_bytes).", param
                )
        return bytes(data)


def _unreachable(param: str) -> InvalidImageError:
    return InvalidImageError("The image can't be fetched from its URL.", param)
