"""Attacks through images that are fetched or decoded."""

import base64
from collections.abc import Mapping

import pytest
from PIL import Image

from serve_app.images.images import read_image
from tests.failing import failing
from tests.serve_app.apps import CHAT, client_of, make_app, question
from tests.serve_app.fakes import FakeBackend
from tests.serve_app.images.test_file_structure import PROFILE, in_front, scans
from tests.serve_app.images.test_images import encoded, uri

PNG = encoded("PNG")


def with_images(*urls: str) -> dict[str, object]:
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"model": "m", "messages": [{"role": "user", "content": parts}]}


URLS = (
    "http://169.254.169.254/latest/meta-data/",
    "https://169.254.169.254/",
    "https://metadata.google.internal/",
    "https://localhost:8265/api/jobs/",
    "http://127.0.0.1:8000/health",
    "https://example.com/a.png",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_x",
    "/etc/passwd",
)


async def test_cve_2026_24779_cve_2025_54381_nothing_is_fetched_by_default(
    backend: FakeBackend,
) -> None:
    async with client_of(make_app(backend)) as client:
        for url in URLS:
            answer = await client.ask(CHAT, with_images(url), 400)
            assert answer.json()["error"]["code"] == "invalid_image", url
            assert url not in answer.text
    assert backend.requests == []


@pytest.mark.parametrize("url", ["http://169.254.169.254/x", "file:///etc/passwd", "//test/x"])
async def test_cve_2026_24779_cve_2025_54381_references_in_a_schema_are_not_fetched(
    backend: FakeBackend, url: str
) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": url}}}
    async with client_of(make_app(backend)) as client:
        answer = await client.post(CHAT, json=question(response_format=named))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"
    assert "root:" not in answer.text
    assert backend.requests == []


@pytest.mark.parametrize("broken", [b"", b"\x89PNG\r\n\x1a\n", PNG[:-20], b"GIF89a", b"x" * 100])
async def test_cve_2026_22778_a_broken_image_reveals_nothing_about_the_decoder(
    backend: FakeBackend, broken: bytes
) -> None:
    texts = []
    async with client_of(make_app(backend)) as client:
        for format_ in ("png", "jpeg", "gif", "webp"):
            answer = await client.post(CHAT, json=with_images(uri(broken, f"image/{format_}")))
            texts.append(answer.text)
            assert answer.status_code in (200, 400)
    assert not any(word in text for text in texts for word in ("0x", "BytesIO", "PIL", "Errno"))


@pytest.mark.parametrize(
    ("images", "limits"),
    [
        ([uri(PNG, "image/png")] * 3, {"max_num_images": 2}),
        (["data:image/png;base64," + base64.b64encode(PNG * 10).decode()], {"max_image_bytes": 99}),
        ([uri(encoded("PNG", (40, 30)), "image/png")], {"max_image_pixels": 1199}),
    ],
)
async def test_cve_2026_5497_22773_100650_count_bytes_and_pixels_are_checked_before_decoding(
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    images: list[str],
    limits: Mapping[str, object],
) -> None:
    monkeypatch.setattr(Image.Image, "load", failing(AssertionError("decoded")))
    async with client_of(make_app(backend, limits=limits)) as client:
        error = await client.refused(CHAT, with_images(*images))
    assert f"limits.{next(iter(limits))}" in error["message"]
    assert backend.requests == []


@pytest.mark.parametrize("bomb", [in_front(PROFILE)(2), scans(65)], ids=["profiles", "scans"])
async def test_cve_2026_5497_22773_100650_a_decompression_bomb_is_refused(
    backend: FakeBackend, bomb: bytes
) -> None:
    media_type = "image/png" if bomb.startswith(PNG[:4]) else "image/jpeg"
    async with client_of(make_app(backend)) as client:
        error = await client.refused(CHAT, with_images(uri(bomb, media_type)))
    assert "too many parts" in error["message"]
    assert backend.requests == []


def test_cve_2026_5497_pillow_refuses_giant_images_everywhere() -> None:
    assert read_image.__module__ == "serve_app.images.images", "importing it sets the limit"
    assert Image.MAX_IMAGE_PIXELS is not None
    assert Image.MAX_IMAGE_PIXELS <= 2**26
