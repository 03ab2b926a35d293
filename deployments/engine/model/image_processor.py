"""The processor of Qwen2.5-VL, for images only.

transformers' own also prepares videos, and can't be made without torchvision, which images don't
need: Pillow reads them.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_processing_utils import BaseImageProcessor
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor


class QwenImageProcessor(Qwen2_5_VLProcessor):
    """Prepares texts and images; each image becomes as many tokens as its size asks for."""

    def __init__(
        self,
        image_processor: BaseImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        chat_template: str | None = None,
        **_: Any,
    ) -> None:
        """Take the parts that `from_pretrained` has read; what a file says of videos is ignored."""
        self.image_token = getattr(tokenizer, "image_token", None) or "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        ProcessorMixin.__init__(  # type: ignore[no-untyped-call] # transformers leaves it untyped
            self, image_processor, tokenizer, chat_template=chat_template
        )
