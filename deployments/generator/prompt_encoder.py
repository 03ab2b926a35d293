"""From a request's prompt to the model's inputs: chat template, tokens, image tensors.

Encodes a micro-batch with one tokenizer call for all texts; prompts with images go through the
model's processor one by one. A request that can't be encoded gets its error in its place, so it
disturbs none of the others.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO

import torch
from PIL import Image, UnidentifiedImageError
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from deployments.chat_template import ChatTemplate
from deployments.contract import (
    ChatMessage,
    GenerationRequest,
    ImagePart,
    TokenizedPrompt,
    TokenizeRequest,
    Tool,
)
from deployments.errors import (
    GenerationFailedError,
    InvalidImageError,
    InvalidRequestError,
    RaystreamError,
)

logger = logging.getLogger("ray.serve")

INPUTS_OF_THE_TEXT = frozenset({"input_ids", "attention_mask"})
"""What a processor returns beside the tensors that belong to images."""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""What the decoder may open; it knows many more formats, some of which start other programs."""

MAX_IMAGE_PIXELS = 2**26
"""No image larger than this is decoded, whatever the ingress lets through."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the model takes it.

    Attributes:
        token_ids: All tokens, image placeholders included.
        model_inputs: Tensors for the images, by the names of the model's `forward` arguments.
    """

    token_ids: tuple[int, ...]
    model_inputs: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text, with its images; special tokens stand in the text unless it is plain."""

    text: str
    images: tuple[bytes, ...]
    is_plain: bool


class PromptEncoder:
    """Encodes prompts for one model.

    Attributes:
        template: Makes text of messages.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, processor: ProcessorMixin | None
    ) -> None:
        """Take the text side of a model; a processor of None means that it takes no images."""
        self._tokenizer = tokenizer
        self._processor = processor
        self.template = ChatTemplate(tokenizer, processor)
        # Gemma's processor has templates write one token per image and writes another for each
        # patch itself; other models know only one of them.
        names = {getattr(side, "image_token", None) for side in (tokenizer, processor)}
        self._image_placeholders = frozenset(name for name in names if name)

    def encode(self, requests: Sequence[GenerationRequest]) -> list[EncodedPrompt | RaystreamError]:
        """Encode what arrived together; each request gets its prompt or its own error."""
        rendered = [self._render(request) for request in requests]
        texts = {
            i: prompt
            for i, prompt in enumerate(rendered)
            if isinstance(prompt, RenderedPrompt) and not prompt.images
        }
        token_ids = self._tokenize_apart(texts)
        encoded: list[EncodedPrompt | RaystreamError] = []
        for i, prompt in enumerate(rendered):
            if not isinstance(prompt, RenderedPrompt):
                encoded.append(prompt)
            elif prompt.images:
                encoded.append(self._encode_images(prompt))
            else:
                found = token_ids[i]
                encoded.append(
                    found if isinstance(found, RaystreamError) else EncodedPrompt(found, {})
                )
        return encoded

    def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Return a prompt's tokens, as many as an answer to it would count.

        Raises:
            RaystreamError: The prompt can't be encoded.
        """
        token_ids = self._tokens_of(request)
        if not request.with_strings:
            return TokenizedPrompt(token_ids)
        strings = self._tokenizer.convert_ids_to_tokens(list(token_ids))
        return TokenizedPrompt(token_ids, tuple(strings))

    def _tokens_of(self, request: TokenizeRequest) -> tuple[int, ...]:
        add_special_tokens = request.add_special_tokens
        if isinstance(request.prompt, str):
            text = _require_unicode(request.prompt, "prompt")
            return self._encode_text(text, add_special_tokens is not False)
        prompt = self._render_chat(request.prompt, request.tools, request.add_generation_prompt)
        if not prompt.images:
            return self._encode_text(prompt.text, add_special_tokens is True)
        encoded = self._encode_images(prompt, add_special_tokens is True)
        if isinstance(encoded, RaystreamError):
            raise encoded
        return encoded.token_ids

    def _encode_text(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, the names of special ones included.

        Raises:
            InvalidRequestError: The tokenizer knows no such token.
        """
        num_known = len(self._tokenizer)
        if min(token_ids, default=0) < 0 or max(token_ids, default=0) >= num_known:
            raise InvalidRequestError(f"token ids must be from 0 to {num_known - 1}", "tokens")
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _render(
        self, request: GenerationRequest
    ) -> RenderedPrompt | EncodedPrompt | RaystreamError:
        prompt = request.prompt
        try:
            if isinstance(prompt, str):
                return RenderedPrompt(_require_unicode(prompt, "prompt"), (), is_plain=True)
            messages = [part for part in prompt if isinstance(part, ChatMessage)]
            if not messages:
                return EncodedPrompt(tuple(i for i in prompt if isinstance(i, int)), {})
            return self._render_chat(messages, request.tools)
        except RaystreamError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a model's own template may raise anything
            return _stumbled("chat template", error)

    def _render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        images = tuple(p.data for m in messages for p in m.parts if isinstance(p, ImagePart))
        if images and self._processor is None:
            raise InvalidRequestError("this model takes no images; send text alone", "messages")
        text = self.template.render(messages, tools, add_generation_prompt)
        text = _require_unicode(text, "messages")
        if images and sum(map(text.count, self._image_placeholders)) != len(images):
            raise InvalidRequestError(
                "the text holds image placeholders of its own; send each image as an image part",
                "messages",
            )
        return RenderedPrompt(text, images, is_plain=False)

    def _tokenize_apart(
        self, prompts: Mapping[int, RenderedPrompt]
    ) -> Mapping[int, tuple[int, ...] | RaystreamError]:
        """Tokenize texts together; if that fails, each in a call of its own."""
        try:
            return self._tokenize(prompts)
        except Exception:  # noqa: BLE001 - a model's own tokenizer may raise anything
            found: dict[int, tuple[int, ...] | RaystreamError] = {}
            for i, prompt in prompts.items():
                try:
                    found |= self._tokenize({i: prompt})
                except Exception as error:  # noqa: BLE001 - as above
                    found[i] = _stumbled("tokenizer", error)
            return found

    def _tokenize(self, prompts: Mapping[int, RenderedPrompt]) -> dict[int, tuple[int, ...]]:
        """Tokenize texts, by their place in the micro-batch.

        Plain prompts get the model's own special tokens, so they take a call of their own.
        """
        token_ids: dict[int, tuple[int, ...]] = {}
        for is_plain in (True, False):
            texts = {i: p.text for i, p in prompts.items() if p.is_plain is is_plain}
            if texts:
                encoded = self._tokenizer(list(texts.values()), add_special_tokens=is_plain)
                token_ids |= zip(texts, map(tuple, encoded["input_ids"]), strict=True)
        return token_ids

    def _encode_images(
        self, prompt: RenderedPrompt, add_special_tokens: bool = False
    ) -> EncodedPrompt | RaystreamError:
        assert self._processor is not None
        try:
            images = [_decode_image(data) for data in prompt.images]
        except InvalidImageError as error:
            return error
        try:
            inputs = self._processor(
                text=[prompt.text],
                images=[images],
                return_tensors="pt",
                text_kwargs={"add_special_tokens": add_special_tokens},
            )
        except ValueError:
            return InvalidImageError("the model can't take an image of this shape", "messages")
        except Exception as error:  # noqa: BLE001 - a model's own processor may raise anything
            return _stumbled("processor", error)
        token_ids = tuple(inputs["input_ids"][0].tolist())
        return EncodedPrompt(
            token_ids, {k: v for k, v in inputs.items() if k not in INPUTS_OF_THE_TEXT}
        )


def _stumbled(part: str, error: Exception) -> GenerationFailedError:
    """Return what a client is told of a foreign part's failure.

    Neither it nor the log gets the part's own words: they may hold the prompt's.
    """
    logger.error("the model's %s has raised %s", part, type(error).__name__)
    return GenerationFailedError(f"the model's {part} has failed at this prompt")


def _require_unicode(text: str, param: str) -> str:
    """Return the text.

    Raises:
        InvalidRequestError: It holds half a surrogate pair, as JSON may; no tokenizer takes that.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the text is not valid Unicode", param) from error
    return text


def _decode_image(data: bytes) -> Image.Image:
    """Decode an image; the error tells nothing of what the decoder said.

    Raises:
        InvalidImageError: The bytes are no image that can be read.
    """
    try:
        image = Image.open(BytesIO(data), formats=IMAGE_FORMATS)
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise InvalidImageError(f"an image has more than {MAX_IMAGE_PIXELS} pixels")
        return image.convert("RGB")
    except (
        UnidentifiedImageError,
        Image.DecompressionBombError,
        OSError,
        ValueError,
        SyntaxError,
    ) as error:
        raise InvalidImageError("an image can't be read; send PNG, JPEG, WebP or GIF") from error
