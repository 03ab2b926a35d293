"""Prompts with images are encoded in turn, within a bound, and in no text's way."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from PIL import Image

from deployments.contract.errors import OverloadedError, OverloadReason, RaystreamError
from deployments.contract.generation import GenerationRequest
from deployments.contract.messages import ChatMessage, ImagePart, TextPart
from deployments.contract.sampling_params import SamplingParams
from deployments.generator.image_prompts import ImagePrompts, has_images
from deployments.generator.prompt_encoder import EncodedPrompt, PromptEncoder
from tests.generator.tiny_processor import gemma3_processor
from tests.images import png

PICTURE = ImagePart(png(Image.new("RGB", (9, 7), "red")))
ASKED = GenerationRequest(
    "image", (ChatMessage("user", (TextPart("What?"), PICTURE)),), SamplingParams()
)
PATIENCE_S = 30


def make_encoder() -> PromptEncoder:
    processor = gemma3_processor()
    return PromptEncoder(processor.tokenizer, processor)


class Gate:
    """Holds the preparation of images up until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = type(gemma3_processor().image_processor)
        stock = kind.__call__
        self.is_reached, self.is_open = threading.Event(), threading.Event()
        self.num_inside = self.most_inside = 0

        def wait(image_processor: Any, *args: Any, **options: Any) -> Any:
            self.num_inside += 1
            self.most_inside = max(self.most_inside, self.num_inside)
            self.is_reached.set()
            assert self.is_open.wait(PATIENCE_S)
            self.num_inside -= 1
            return stock(image_processor, *args, **options)

        monkeypatch.setattr(kind, "__call__", wait)


def test_texts_are_encoded_while_an_image_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, gate = make_encoder(), Gate(monkeypatch)
    text = GenerationRequest("text", "Good day", SamplingParams())
    with ThreadPoolExecutor(2) as threads:
        image = threads.submit(encoder.encode, [ASKED])
        try:
            assert gate.is_reached.wait(PATIENCE_S)
            (found,) = threads.submit(encoder.encode, [text]).result(PATIENCE_S)
            assert isinstance(found, EncodedPrompt)
            assert not image.done()
        finally:
            gate.is_open.set()
        (seen,) = image.result(PATIENCE_S)
    assert isinstance(seen, EncodedPrompt)


async def encode(prompts: ImagePrompts, held: ExitStack) -> EncodedPrompt | RaystreamError:
    return await asyncio.wait_for(prompts.encode(ASKED, held), PATIENCE_S)


async def test_pixels_are_bounded_until_their_sequences_end() -> None:
    prompts = ImagePrompts(make_encoder(), max_num_calls=1, max_bytes=1)
    with ExitStack() as held:
        assert isinstance(await encode(prompts, held), EncodedPrompt)
        assert prompts.num_bytes > 1
        refused = await encode(prompts, held)
        assert isinstance(refused, OverloadedError)
        assert refused.reason is OverloadReason.IMAGES
        assert "images" in refused.message
    assert prompts.num_bytes == 0
    with ExitStack() as held:
        assert isinstance(await encode(prompts, held), EncodedPrompt)
    prompts.close()


async def test_prompts_that_come_at_once_are_encoded_in_turn_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, gate = ImagePrompts(make_encoder(), max_num_calls=1, max_bytes=1), Gate(monkeypatch)
    with ExitStack() as held:
        asked = [asyncio.create_task(encode(prompts, held)) for _ in range(3)]
        assert await asyncio.to_thread(gate.is_reached.wait, PATIENCE_S)
        gate.is_open.set()
        found = await asyncio.gather(*asked)
    assert [type(each) for each in found] == [EncodedPrompt, OverloadedError, OverloadedError]
    assert gate.most_inside == 1
    prompts.close()


def test_only_messages_have_images() -> None:
    assert has_images(ASKED.prompt)
    assert not has_images("text")
    assert not has_images((1, 2))
    assert not has_images((ChatMessage("user", (TextPart("a"),)),))
