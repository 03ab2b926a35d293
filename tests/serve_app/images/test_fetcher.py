import asyncio
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from deployments.contract.errors import InvalidImageError
from deployments.contract.messages import ChatMessage
from serve_app.config import LimitsConfig
from serve_app.images.fetcher import MAX_CONCURRENT_FETCHES, ImageFetcher, is_public
from tests.offenders import for_each
from tests.serve_app.apps import CHAT, client_of, make_app
from tests.serve_app.fakes import FakeBackend
from tests.serve_app.images.test_images import encoded
from tests.serve_app.tls_server import FixedResolver, certify, tls_server

HOST = "images.test"
URL = f"https://{HOST}/a.png"
PNG = encoded("PNG")
# Longer than a pause of the machine.
LIMITS = LimitsConfig(allowed_image_domains=(HOST,), max_image_bytes=1000, image_fetch_timeout_s=30)
Files = tuple[Path, Path]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return certify(tmp_path_factory.mktemp("tls"), HOST)


def answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n" + body


def fetcher(
    files: Files,
    resolver: FixedResolver,
    limits: LimitsConfig = LIMITS,
    is_allowed: Callable[[str], bool] = lambda _: True,
    trusted: bool = True,
) -> ImageFetcher:
    tls = ssl.create_default_context()
    if trusted:
        tls.load_verify_locations(files[0])
    return ImageFetcher(limits, lambda: resolver, is_allowed, tls)


async def fetch(one: ImageFetcher, url: str = URL) -> bytes:
    return (await one.fetch_all({url: "p"}))[url]


async def test_an_image_is_fetched_from_the_resolved_address_with_the_hosts_name(
    files: Files,
) -> None:
    async with tls_server(*files, lambda _: answer(PNG)) as server:
        resolver = FixedResolver(server.port)
        assert await fetch(fetcher(files, resolver)) == PNG
    assert (resolver.asked, server.names) == ([HOST], [HOST])
    (head,) = server.heads
    assert head.startswith(b"GET /a.png HTTP/1.1\r\nHost: images.test\r\n")
    assert b"cookie" not in head.lower()
    assert b"authorization" not in head.lower()


@pytest.mark.parametrize("status", ["301 Moved", "302 Found", "307 T", "308 P"])
async def test_a_redirect_is_not_followed(files: Files, status: str) -> None:
    seen: list[str] = []

    def redirect(path: str) -> bytes:
        seen.append(path)
        return answer(b"", status, f"Location: https://{HOST}/b.png")

    async with tls_server(*files, redirect) as server:
        with pytest.raises(InvalidImageError):
            await fetch(fetcher(files, FixedResolver(server.port)))
    assert seen == ["/a.png"]


@pytest.mark.parametrize("status", ["204 No", "404 Not Found", "500 Oh", "206 Partial"])
async def test_any_other_status_is_an_error_that_does_not_reveal_it(
    files: Files, status: str
) -> None:
    async with tls_server(*files, lambda _: answer(PNG, status)) as server:
        with pytest.raises(InvalidImageError) as caught:
            await fetch(fetcher(files, FixedResolver(server.port)))
    assert str(caught.value) == "The image can't be fetched from its URL."
    assert caught.value.__cause__ is None


async def test_reading_stops_at_the_limit(files: Files) -> None:
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 1_000_000
    async with tls_server(*files, lambda _: endless) as server:
        with pytest.raises(InvalidImageError, match=r"limits\.max_image_bytes"):
            await fetch(fetcher(files, FixedResolver(server.port)))


async def test_a_silent_server_times_out(files: Files) -> None:
    limits = LIMITS.model_copy(update={"image_fetch_timeout_s": 0.05})
    async with tls_server(*files, lambda _: None) as server:
        with pytest.raises(InvalidImageError, match="can't be fetched"):
            await fetch(fetcher(files, FixedResolver(server.port), limits))


async def test_the_wait_for_a_slot_counts_towards_the_timeout(files: Files) -> None:
    one = fetcher(
        files, FixedResolver(1), LIMITS.model_copy(update={"image_fetch_timeout_s": 0.05})
    )
    for _ in range(MAX_CONCURRENT_FETCHES):
        await one._slots.acquire()
    async with asyncio.timeout(30):
        with pytest.raises(InvalidImageError, match="can't be fetched"):
            await fetch(one)


async def test_an_untrusted_certificate_is_refused(files: Files) -> None:
    async with tls_server(*files, lambda _: answer(PNG)) as server:
        with pytest.raises(InvalidImageError, match="can't be fetched"):
            await fetch(fetcher(files, FixedResolver(server.port), trusted=False))
    assert server.heads == []


async def test_a_certificate_for_another_name_is_refused(files: Files) -> None:
    limits = LIMITS.model_copy(update={"allowed_image_domains": ("other.test",)})
    async with tls_server(*files, lambda _: answer(PNG)) as server:
        with pytest.raises(InvalidImageError, match="can't be fetched"):
            await fetch(
                fetcher(files, FixedResolver(server.port), limits), "https://other.test/a.png"
            )
    assert server.heads == []


@pytest.mark.parametrize(
    "addresses",
    [("127.0.0.1",), ("93.184.216.34", "127.0.0.1"), ("::ffff:127.0.0.1",), ("169.254.169.254",)],
)
async def test_a_name_with_a_private_address_is_not_connected_to(
    files: Files, addresses: Sequence[str]
) -> None:
    async with tls_server(*files, lambda _: answer(PNG)) as server:
        resolver = FixedResolver(server.port, addresses)
        with pytest.raises(InvalidImageError, match="can't be fetched"):
            await fetch(fetcher(files, resolver, is_allowed=is_public))
    assert (server.names, server.heads) == ([], [])


async def test_a_name_is_looked_up_once_so_its_address_cannot_change(files: Files) -> None:
    checked: list[str] = []

    def allow(address: str) -> bool:
        checked.append(address)
        return True

    async with tls_server(*files, lambda _: answer(PNG)) as server:
        resolver = FixedResolver(server.port)
        await fetch(fetcher(files, resolver, is_allowed=allow))
    assert (len(resolver.asked), checked) == (1, ["127.0.0.1"])


@for_each(
    "",
    "http://images.test/a.png",
    "HTTP://images.test/a.png",
    "ftp://images.test/a.png",
    "file:///etc/passwd",
    "file://images.test/etc/passwd",
    "//images.test/a.png",
    "images.test/a.png",
    "https:images.test/a.png",
    "https:///images.test/a.png",
    "https://images.test:8443/a.png",
    "https://user@images.test/a.png",
    "https://user:password@images.test/a.png",
    "https://images.test@evil.test/a.png",
    "https://evil.test#@images.test/a.png",
    "https://evil.test\\@images.test/a.png",
    "https://images.test.evil.test/a.png",
    "https://xn--images.test/a.png",
    "https://sub.images.test/a.png",
    "https://images.test./a.png",
    "https://127.0.0.1/a.png",
    "https://[::1]/a.png",
    "https://[::ffff:127.0.0.1]/a.png",
    "https://2130706433/a.png",
    "https://0x7f.1/a.png",
    "https://localhost/a.png",
    "https://images.test:443:80/",
    "https://[images.test/",
    "https://images.test/" + "a" * 3000,
)
async def test_any_other_url_is_refused_without_a_lookup(url: str, files: Files) -> None:
    resolver = FixedResolver(1)
    with pytest.raises(InvalidImageError, match="not fetched") as caught:
        await fetch(fetcher(files, resolver), url)
    assert caught.value.param == "p"
    assert resolver.asked == []
    assert "passw" not in str(caught.value)


async def test_the_hosts_case_does_not_matter(files: Files) -> None:
    async with tls_server(*files, lambda _: answer(PNG)) as server:
        url = "HTTPS://Images.TEST/a.png"
        assert await fetch(fetcher(files, FixedResolver(server.port)), url) == PNG


async def test_one_failed_image_fails_all(files: Files) -> None:
    def some(path: str) -> bytes:
        return answer(PNG) if path.startswith("/a.png") else answer(b"", "404 No")

    async with tls_server(*files, some) as server:
        one = fetcher(files, FixedResolver(server.port))
        assert len(await one.fetch_all({URL: "p", f"{URL}?2": "q"})) == 2
        with pytest.raises(InvalidImageError) as caught:
            await one.fetch_all({URL: "p", f"https://{HOST}/b.png": "q"})
    assert caught.value.param == "q"


@for_each(
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "127.0.0.1",
    "169.254.169.254",
    "172.16.0.1",
    "192.0.0.1",
    "192.168.0.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::ffff:10.0.0.1",
    "::ffff:169.254.169.254",
    "64:ff9b::10.0.0.1",
    "64:ff9b:1::1",
    "2002:0a00:0001::1",
    "2001:0000:4136:e378:8000:63bf:f5ff:fffe",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "ff02::1",
)
def test_private_addresses_are_not_public(address: str) -> None:
    assert not is_public(address)


@for_each("93.184.216.34", "2606:2800:220:1::1", "::ffff:93.184.216.34", "64:ff9b::8.8.8.8")
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


def content(url: str) -> dict[str, object]:
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


async def test_a_fetched_image_reaches_the_model(files: Files, backend: FakeBackend) -> None:
    async with tls_server(*files, lambda _: answer(PNG)) as server:
        images = fetcher(files, FixedResolver(server.port))
        async with client_of(make_app(backend, images=images)) as client:
            assert (await client.post(CHAT, json=content(URL))).status_code == 200
    message = backend.requests[0].prompt[0]
    assert isinstance(message, ChatMessage)
    assert [getattr(part, "data", None) for part in message.parts] == [PNG]


async def test_fetched_data_that_is_not_an_image_is_refused(
    files: Files, backend: FakeBackend
) -> None:
    page = answer(b"<html>secret</html>", "200 OK", "Content-Type: image/png")
    async with tls_server(*files, lambda _: page) as server:
        images = fetcher(files, FixedResolver(server.port))
        async with client_of(make_app(backend, images=images)) as client:
            refused = await client.post(CHAT, json=content(URL))
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_image"
    assert refused.json()["error"]["param"] == "messages[0].content[0].image_url.url"
    assert "secret" not in refused.text


async def test_by_default_nothing_is_fetched(backend: FakeBackend) -> None:
    async with client_of(make_app(backend)) as client:
        refused = await client.post(CHAT, json=content(URL))
    assert refused.json()["error"]["code"] == "invalid_image"
    assert "limits.allowed_image_domains is empty" in refused.json()["error"]["message"]
