import base64
import threading
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image
from pydantic import ValidationError

from deployments.contract import ChatMessage, ImagePart, TextPart
from serve_app.api.chat_schema import ChatRequest
from serve_app.api.message_schema import MAX_NUM_PARTS
from serve_app.config import AppConfig, ModelConfig
from serve_app.ingress import build_app
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


async def test_messages_reach_the_replica_part_by_part(
    client: httpx.AsyncClient, backend: FakeBackend
) -> None:
    picture = png(3, 2)
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "name": "me", "content": [{"type": "text", "text": "?"}]},
        {"role": "assistant", "content": "!", "refusal": None, "tool_calls": []},
        {"role": "user", "content": [image_part(picture), {"type": "text", "text": "What?"}]},
    ]
    assert (await client.post(CHAT, json={**HI, "messages": messages})).status_code == 200
    assert backend.requests[0].prompt == (
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
async def test_an_image_that_will_not_do_is_refused(
    client: httpx.AsyncClient, backend: FakeBackend, role: str, parts: list[Any], hint: str
) -> None:
    messages = [{"role": role, "content": parts}]
    answer = await client.post(CHAT, json={**HI, "messages": messages})
    assert answer.status_code == 400
    assert hint in answer.json()["error"]["message"]
    assert not backend.requests


@pytest.mark.parametrize(
    "messages",
    [
        [HI["messages"][0]] * (MAX_NUM_PARTS + 1),
        [{"role": "user", "content": [{"type": "text", "text": ""}] * (MAX_NUM_PARTS + 1)}],
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/text-generation"])
async def test_more_parts_than_anyone_needs_are_refused_by_their_number(
    path: str, messages: list[Any]
) -> None:
    app = build_app(AppConfig(models=(ModelConfig(id="m", source="x"),)), {"m": FakeBackend()})
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(path, json={"model": "m", "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages"
    assert str(MAX_NUM_PARTS + 1) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields", [{"messages": [0] * 3}, {"messages": [{"role": "user", "content": [0] * 3}]}]
)
def test_a_list_is_read_up_to_its_first_mistake(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({**HI, **fields})
    assert caught.value.error_count() == 1


async def test_images_are_read_beside_the_event_loop(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def read_image(uri: str, max_pixels: int, param: str) -> ImagePart:
        threads.append(threading.current_thread())
        return ImagePart(b"")

    monkeypatch.setattr("serve_app.api.message_schema.read_image", read_image)
    messages = [{"role": "user", "content": [image_part(png(3, 2))]}]
    assert (await client.post(CHAT, json={**HI, "messages": messages})).status_code == 200
    assert threads
    assert threading.main_thread() not in threads


async def test_a_model_without_eyes_refuses_images(config: AppConfig) -> None:
    transport = httpx.ASGITransport(build_app(config, {"m": FakeBackend(accepts_images=False)}))
    messages = [{"role": "user", "content": [image_part(png(3, 2))]}]
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.post(CHAT, json={**HI, "messages": messages})
    assert answer.json()["error"]["message"] == "This model reads no images."
