import base64
import threading
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image

from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from serve_app.config import AppConfig
from serve_app.ingress import AppParts, build_app
from tests.serve_app.apps import Client
from tests.serve_app.fakes import FakeBackend

CHAT = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def png(width: int, height: int) -> bytes:
    file = BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return file.getvalue()


def image_part(data: bytes, media_type: str = "image/png") -> dict[str, Any]:
    uri = f"data:{media_type};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": uri}}


async def test_messages_reach_the_replica_part_by_part(client: Client) -> None:
    picture = png(3, 2)
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "!", "refusal": None, "tool_calls": []},
        {"role": "user", "content": [image_part(picture), {"type": "text", "text": "What?"}]},
    ]
    assert (await client.post(CHAT, json={**HI, "messages": messages})).status_code == 200
    assert client.backend.requests[0].prompt == (
        ChatMessage("system", (TextPart("Be brief."),)),
        ChatMessage("user", (TextPart("?"),)),
        ChatMessage("assistant", (TextPart("!"),)),
        ChatMessage("user", (ImagePart(picture), TextPart("What?"))),
    )


@pytest.mark.parametrize(
    ("role", "parts", "hint"),
    [
        ("assistant", [image_part(png(3, 2))], "user's message"),
        ("user", [image_part(png(3, 2))] * 3, "at most 2"),
        ("user", [image_part(png(11, 10))], "100 pixels"),
        ("user", [image_part(b"no image")], "can't be read"),
    ],
)
async def test_an_unusable_image_is_refused(
    client: Client, role: str, parts: list[Any], hint: str
) -> None:
    messages = [{"role": role, "content": parts}]
    error = await client.refused(CHAT, {**HI, "messages": messages})
    assert hint in error["message"]
    assert not client.backend.requests


@pytest.mark.parametrize("surface", ["/v1/chat/completions", "/v1/responses"])
async def test_the_bytes_of_an_image_decide_whatever_its_label_and_lines(
    client: Client, surface: str
) -> None:
    picture = png(3, 2)
    text = base64.encodebytes(picture).decode().rstrip("=\n")
    url = f"data:image/jpeg;base64,{text}"
    part = (
        {"type": "input_image", "image_url": url}
        if surface == "/v1/responses"
        else {"type": "image_url", "image_url": {"url": url}}
    )
    turns = [{"role": "user", "content": [part]}]
    body = {"model": "m", "input" if surface == "/v1/responses" else "messages": turns}
    assert (await client.post(surface, json=body)).status_code == 200
    assert client.backend.requests[0].prompt == (ChatMessage("user", (ImagePart(picture),)),)


async def test_images_are_decoded_off_the_event_loop(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def read_image(uri: str, max_pixels: int, param: str) -> ImagePart:
        threads.append(threading.current_thread())
        return ImagePart(b"")

    monkeypatch.setattr("serve_app.api.requests.prompt_reader.read_image", read_image)
    messages = [{"role": "user", "content": [image_part(png(3, 2))]}]
    assert (await client.post(CHAT, json={**HI, "messages": messages})).status_code == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_a_model_that_does_not_read_images_refuses_them(config: AppConfig) -> None:
    transport = httpx.ASGITransport(
        build_app(AppParts(config, {"m": FakeBackend(accepts_images=False)}))
    )
    messages = [{"role": "user", "content": [image_part(png(3, 2))]}]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(CHAT, json={**HI, "messages": messages})
    message = answer.json()["error"]["message"]
    assert message == "messages[0].content[0]: This model does not read images."
