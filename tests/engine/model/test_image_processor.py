from typing import Any

import pytest
from PIL import Image
from transformers import PreTrainedTokenizerBase
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from deployments.engine.model.image_processor import QwenImageProcessor
from tests.engine.tiny_models import IMAGE_TOKEN_ID, byte_tokenizer

PAD = "<|image_pad|>"


def processor(tokenizer: PreTrainedTokenizerBase, **parts: Any) -> QwenImageProcessor:
    images = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=4096)
    return QwenImageProcessor(images, tokenizer, "{{ messages }}", **parts)


def qwen_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer that has Qwen's token for images, and does not name it."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([PAD], special_tokens=True)
    return tokenizer


@pytest.mark.parametrize("name", [None, "<special5>"])
def test_the_token_of_images_is_the_one_that_the_tokenizer_names_or_qwen_s(
    name: str | None,
) -> None:
    tokenizer: Any = qwen_tokenizer()
    tokenizer.image_token = name
    made = processor(tokenizer)
    assert made.image_token == (name or PAD)
    expected = IMAGE_TOKEN_ID if name else tokenizer.convert_tokens_to_ids(PAD)
    assert made.image_token_id == expected
    assert made.chat_template == "{{ messages }}"


def test_each_image_becomes_as_many_tokens_as_its_size_asks_for() -> None:
    made = processor(qwen_tokenizer())
    images = [Image.new("RGB", size) for size in ((8, 8), (24, 16))]
    given = made(text=[f"a{PAD}b{PAD}"], images=[images], return_tensors="pt")
    assert given["image_grid_thw"].tolist() == [[1, 2, 2], [1, 4, 6]]
    assert given["input_ids"][0].tolist().count(made.image_token_id) == 1 + 6


def test_what_a_file_says_of_videos_is_ignored() -> None:
    made = processor(qwen_tokenizer(), video_processor=object(), video_token="<|video_pad|>")
    assert not hasattr(made, "video_processor")
