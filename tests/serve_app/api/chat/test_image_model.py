"""Qwen2.5-VL from its files to an answer: an image takes as many tokens as its size asks for."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deployments.contract.errors import ContextLengthExceededError, InvalidImageError
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.contract.sampling_params import SamplingParams
from deployments.engine.model.loader import load_text_side
from deployments.generator import prompt_encoder
from deployments.generator.images import decode_image
from deployments.generator.prompt_encoder import EncodedPrompt, PromptEncoder
from deployments.generator_replica import GeneratorReplica
from serve_app.config import AppConfig
from tests.deployments.tiny_folder import save_text_model
from tests.engine.tiny_models import (
    IMAGE_TOKEN_ID,
    PATCH_SIZE,
    byte_tokenizer,
    generate,
    qwen2_5_vl,
)
from tests.failing import failing
from tests.images import data_uri, png
from tests.serve_app.apps import AppClient
from tests.serve_app.local_replica import local_client, local_generator

TEMPLATE = (
    "{% for message in messages %}<special1>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'image' %}<special3><special5><special4>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %}<special2>{% endfor %}"
    "{% if add_generation_prompt %}<special1>assistant\n{% endif %}"
)
SETTINGS = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "patch_size": PATCH_SIZE,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": (2 * PATCH_SIZE) ** 2,
    "max_pixels": 9 * (2 * PATCH_SIZE) ** 2,
}
SMALL, WIDE = Image.new("RGB", (9, 7), "red"), Image.new("RGB", (40, 24), "blue")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint with the files that Qwen's have."""
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    save_text_model(folder, qwen2_5_vl())
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    named = {**json.loads(settings.read_text()), "image_token": "<special5>"}
    settings.write_text(json.dumps(named))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return folder


@pytest.fixture(scope="module")
def encoder(folder: Path) -> PromptEncoder:
    tokenizer, processor, _ = load_text_side(str(folder), revision=None)
    return PromptEncoder(tokenizer, processor)


def encode(encoder: PromptEncoder, *parts: TextPart | ImagePart) -> EncodedPrompt:
    request = GenerationRequest("r", (ChatMessage("user", parts),), SamplingParams())
    (encoded,) = encoder.encode([request])
    assert isinstance(encoded, EncodedPrompt)
    return encoded


def test_an_image_takes_as_many_tokens_as_its_size_asks_for(encoder: PromptEncoder) -> None:
    assert encoder.accepts_images
    encoded = encode(
        encoder, ImagePart(png(SMALL)), TextPart("a"), ImagePart(png(WIDE)), TextPart("b")
    )
    grids = encoded.model_inputs["image_grid_thw"]
    assert grids.tolist() == [[1, 2, 2], [1, 4, 6]]
    assert encoded.token_ids.count(IMAGE_TOKEN_ID) == 1 + 6
    assert len(encoded.model_inputs["pixel_values"]) == 4 + 24
    types = encoded.model_inputs["mm_token_type_ids"]
    assert types.tolist() == [[int(i == IMAGE_TOKEN_ID) for i in encoded.token_ids]]


def test_an_image_of_a_shape_that_the_model_can_not_take_is_refused(encoder: PromptEncoder) -> None:
    line = ImagePart(png(Image.new("RGB", (2010, 10))))
    request = GenerationRequest("r", (ChatMessage("user", (line,)),), SamplingParams())
    (error,) = encoder.encode([request])
    assert isinstance(error, InvalidImageError)


def test_images_of_too_many_tokens_are_refused_before_any_is_decoded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, processor, _ = load_text_side(str(folder), revision=None)
    monkeypatch.setattr(prompt_encoder, "decode_image", failing(AssertionError("was decoded")))
    encoder = PromptEncoder(tokenizer, processor, max_model_len=12)
    wide = ChatMessage("user", (ImagePart(png(WIDE)), ImagePart(png(WIDE))))
    (error,) = encoder.encode([GenerationRequest("r", (wide,), SamplingParams())])
    assert isinstance(error, ContextLengthExceededError)
    assert "12 tokens" in error.message


async def test_a_text_is_answered_while_an_image_is_prepared(
    client: AppClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_reached, is_open = threading.Event(), threading.Event()

    def wait(data: bytes) -> Image.Image:
        is_reached.set()
        assert is_open.wait(30)
        return decode_image(data)

    monkeypatch.setattr(prompt_encoder, "decode_image", wait)
    images = asyncio.create_task(client.ask("/v1/chat/completions", asked(SMALL)))
    try:
        assert await asyncio.to_thread(is_reached.wait, 30)
        text = await asyncio.wait_for(client.ask("/v1/chat/completions", asked()), 30)
        assert text.status_code == 200
        assert not images.done()
    finally:
        is_open.set()
    assert (await images).status_code == 200


@pytest.fixture(scope="module")
def generator(folder: Path) -> Iterator[GeneratorReplica]:
    with local_generator(folder, max_model_len=128) as made:
        yield made


@pytest.fixture
def config(config: AppConfig) -> AppConfig:
    """Allow images of more pixels than the other tests have."""
    limits = config.limits.model_copy(update={"max_image_pixels": 1_000})
    return config.model_copy(update={"limits": limits})


@pytest.fixture
async def client(generator: GeneratorReplica, config: AppConfig) -> AsyncIterator[AppClient]:
    async with local_client(generator, config) as client:
        yield client


def asked(*pictures: Image.Image) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_uri(each)}} for each in pictures]
    content = [*parts, {"type": "text", "text": "What?"}]
    return {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "repetition_penalty": 1.0,
        "max_tokens": 12,
    }


@pytest.mark.parametrize("pictures", [(), (SMALL,), (WIDE,), (WIDE, SMALL)], ids=len)
async def test_an_answer_about_images_over_http_is_that_of_generate(
    client: AppClient, encoder: PromptEncoder, pictures: tuple[Image.Image, ...]
) -> None:
    told = (await client.ask("/v1/chat/completions", asked(*pictures))).json()
    parts = [ImagePart(png(each)) for each in pictures]
    encoded = encode(encoder, *parts, TextPart("What?"))
    expected = generate(qwen2_5_vl, encoded.token_ids, 12, encoded.model_inputs)
    text = byte_tokenizer().decode(expected, skip_special_tokens=True)
    assert told["choices"][0]["message"]["content"] == text
    assert told["usage"]["prompt_tokens"] == len(encoded.token_ids)
