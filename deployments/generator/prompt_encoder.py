"""Encodes a request's prompt as the model's inputs: chat template, tokens, image tensors.

The texts of a micro-batch are tokenized together; prompts with images go through the model's
processor one by one. A request that can't be encoded gets its own error and does not affect the
others.

A text is tokenized in milliseconds, and an image may take seconds. So `encode` may run on two
threads at once, one of them for prompts with images; they share only the tokenizer, in turns.
"""

import copy
import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Self

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from deployments.compute.tokenizer_files import require_embeddings
from deployments.contract.errors import (
    GenerationFailedError,
    InvalidImageError,
    InvalidRequestError,
    RaystreamError,
)
from deployments.contract.formats.reasoning_format import PromptReasoning
from deployments.contract.generation import GenerationRequest, TokenizedPrompt, TokenizeRequest
from deployments.contract.messages import ChatMessage, ImagePart, TemplatePairs, Tool
from deployments.generator.chat_template import ChatTemplate
from deployments.generator.context_length import require_images_fit
from deployments.generator.images import decode_image, image_size
from deployments.generator.reasoning import choose_reasoning_format

logger = logging.getLogger("ray.serve")

INPUTS_OF_THE_TEXT = frozenset({"input_ids", "attention_mask"})
"""A processor's outputs that are not image tensors."""

DIGEST_BYTES: Final = 8
"""Tells prompts apart by chance, not against a forger: a client can only mislead itself."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as inputs of the model.

    Attributes:
        token_ids: All tokens, image placeholders included.
        model_inputs: Tensors for the images, by the names of the model's `forward` arguments.
        reasoning: What the prompt's end says about reasoning.
        digest: Of the tokens and the images' files, `DIGEST_BYTES` long. Equal if a model of the
            same version would read the same.
    """

    token_ids: tuple[int, ...]
    model_inputs: Mapping[str, torch.Tensor]
    reasoning: PromptReasoning
    digest: bytes

    @classmethod
    def of_text(
        cls, token_ids: tuple[int, ...], reasoning: PromptReasoning = PromptReasoning.OPEN
    ) -> Self:
        """Return a prompt without images."""
        return cls(token_ids, {}, reasoning, _digest_of(token_ids))


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text, with its images; a text that is not plain contains its special tokens."""

    text: str
    images: tuple[bytes, ...]
    is_plain: bool
    reasoning: PromptReasoning = PromptReasoning.OPEN


class _SharedTokenizer:
    """A processor's tokenizer whose calls take turns with others: each sets it up again."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turn: Lock) -> None:
        """Wrap a tokenizer; `turn` is held during each call."""
        self._tokenizer = tokenizer
        self._turn = turn

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Tokenize, as the tokenizer does."""
        with self._turn:
            return self._tokenizer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the tokenizer."""
        return getattr(self._tokenizer, name)


class PromptEncoder:
    """Encodes prompts for one model.

    Attributes:
        template: Renders messages as text.
        reasoning_format: How the model marks its reasoning; None if that is not separated.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None,
        reasoning_parser: str = "none",
        *,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
    ) -> None:
        """Prepare to encode for a model.

        Args:
            tokenizer: The model's tokenizer.
            processor: The model's processor; None means that it takes no images.
            reasoning_parser: See `ModelSpec`.
            vocab_size: The number of tokens that the model has embeddings for; None: enough.
            max_model_len: The most tokens of a sequence; images that take as many are refused
                unread. None: no limit.

        Raises:
            UnsupportedModelError: See `ChatTemplate`, `choose_reasoning_format` and
                `require_embeddings`.
        """
        self._tokenizer = tokenizer
        self._turn = Lock()  # the tokenizer's
        self._processor = processor
        if processor is not None:
            self._processor = copy.copy(processor)
            self._processor.tokenizer = _SharedTokenizer(processor.tokenizer, self._turn)
        self._max_model_len = max_model_len
        self.template = ChatTemplate(tokenizer, processor)
        self.reasoning_format = choose_reasoning_format(reasoning_parser, self.template, tokenizer)
        if vocab_size is not None:
            written = self.template.probes()
            if self.accepts_images:
                written += self.template.image_placeholders
            require_embeddings(tokenizer, vocab_size, written)

    @property
    def accepts_images(self) -> bool:
        """Whether messages may hold images."""
        return self._processor is not None and (
            self.template.places_images or not self.template.exists
        )

    def encode(self, requests: Sequence[GenerationRequest]) -> list[EncodedPrompt | RaystreamError]:
        """Encode requests together; each gets its prompt or its own error.

        Thread-safe.
        """
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
                    found
                    if isinstance(found, RaystreamError)
                    else EncodedPrompt.of_text(found, prompt.reasoning)
                )
        return encoded

    def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        """Return a prompt's tokens, as they would be counted for generation.

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
        prompt = self._render_chat(
            request.prompt, request.tools, request.template_kwargs, request.add_generation_prompt
        )
        if not prompt.images:
            return self._encode_text(prompt.text, add_special_tokens is True)
        encoded = self._encode_images(prompt, add_special_tokens is True)
        if isinstance(encoded, RaystreamError):
            raise encoded
        return encoded.token_ids

    def _encode_text(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        with self._turn:
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens)
        return tuple(encoded["input_ids"])

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, including special ones.

        Raises:
            InvalidRequestError: A token id is out of range.
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
                return EncodedPrompt.of_text(tuple(i for i in prompt if isinstance(i, int)))
            return self._render_chat(messages, request.tools, request.template_kwargs)
        except RaystreamError as error:
            return error
        except Exception as error:  # noqa: BLE001 - a model's own template may raise anything
            return _part_failed("chat template", error)

    def _render_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
        template_kwargs: TemplatePairs,
        add_generation_prompt: bool = True,
    ) -> RenderedPrompt:
        images = tuple(p.data for m in messages for p in m.parts if isinstance(p, ImagePart))
        if images and not self.accepts_images:
            raise InvalidRequestError("this model takes no images; send only text", "messages")
        text = self.template.render(messages, tools, add_generation_prompt, dict(template_kwargs))
        text = _require_unicode(text, "messages")
        if images:
            self._require_a_place_each(text, len(images))
        known = self.reasoning_format
        reasoning = PromptReasoning.OPEN if known is None else known.at_end_of(text)
        return RenderedPrompt(text, images, is_plain=False, reasoning=reasoning)

    def _require_a_place_each(self, text: str, num_images: int) -> None:
        """Refuse a rendered text that has more or fewer placeholders than images."""
        num_places = sum(map(text.count, self.template.image_placeholders))
        if num_places > num_images:
            raise InvalidRequestError(
                "the text holds image placeholders of its own; send each image as an image part",
                "messages",
            )
        if num_places < num_images:
            raise InvalidRequestError(
                "the model's chat template leaves out an image; send images in the user's messages",
                "messages",
            )

    def _tokenize_apart(
        self, prompts: Mapping[int, RenderedPrompt]
    ) -> Mapping[int, tuple[int, ...] | RaystreamError]:
        """Tokenize texts together; if that fails, tokenize each in its own call."""
        try:
            return self._tokenize(prompts)
        except Exception:  # noqa: BLE001 - a model's own tokenizer may raise anything
            found: dict[int, tuple[int, ...] | RaystreamError] = {}
            for i, prompt in prompts.items():
                try:
                    found |= self._tokenize({i: prompt})
                except Exception as error:  # noqa: BLE001 - as above
                    found[i] = _part_failed("tokenizer", error)
            return found

    def _tokenize(self, prompts: Mapping[int, RenderedPrompt]) -> dict[int, tuple[int, ...]]:
        """Tokenize texts, by their index in the micro-batch.

        Plain prompts get the model's special tokens, so they need a separate call.
        """
        token_ids: dict[int, tuple[int, ...]] = {}
        for is_plain in (True, False):
            texts = {i: p.text for i, p in prompts.items() if p.is_plain is is_plain}
            if texts:
                with self._turn:
                    encoded = self._tokenizer(list(texts.values()), add_special_tokens=is_plain)
                token_ids |= zip(texts, map(tuple, encoded["input_ids"]), strict=True)
        return token_ids

    def _encode_images(
        self, prompt: RenderedPrompt, add_special_tokens: bool = False
    ) -> EncodedPrompt | RaystreamError:
        assert self._processor is not None
        try:
            self._require_fit([image_size(data) for data in prompt.images])
            images = [decode_image(data) for data in prompt.images]
            inputs = self._processor(
                text=[prompt.text],
                images=[images],
                return_tensors="pt",
                text_kwargs={"add_special_tokens": add_special_tokens},
            )
        except InvalidRequestError as error:
            return error
        except ValueError:
            return InvalidImageError("the model can't take an image of this shape", "messages")
        except Exception as error:  # noqa: BLE001 - a model's own processor may raise anything
            return _part_failed("processor", error)
        token_ids = tuple(inputs["input_ids"][0].tolist())
        return EncodedPrompt(
            token_ids,
            {k: v for k, v in inputs.items() if k not in INPUTS_OF_THE_TEXT},
            prompt.reasoning,
            _digest_of(token_ids, prompt.images),
        )

    def _require_fit(self, sizes: Sequence[tuple[int, int]]) -> None:
        """Refuse images whose tokens alone are too many, by their heights and widths.

        The work and the memory of preparing an image grow with its tokens: a PNG of 37 KB can
        become 294 MiB of Qwen2.5-VL's patches.

        Raises:
            ContextLengthExceededError: See `require_images_fit`.
            ValueError: The model can't take an image of such a shape.
        """
        # Private, but what transformers' own users with other engines count by.
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if self._max_model_len is not None and count is not None:
            found = count(image_sizes=[list(size) for size in sizes]).num_image_tokens
            require_images_fit(sum(found), self._max_model_len)


def _digest_of(token_ids: Sequence[int], images: Sequence[bytes] = ()) -> bytes:
    """Return the digest of a prompt; the tokens say how many images there are, and where."""
    found = hashlib.blake2b(array("q", token_ids), digest_size=DIGEST_BYTES)
    for data in images:
        found.update(hashlib.blake2b(data).digest())
    return found.digest()


def _part_failed(part: str, error: Exception) -> GenerationFailedError:
    """Return the error for a failure in a model's own code, and log it.

    Neither contains the exception's message, which may quote the prompt.
    """
    logger.error("the model's %s raised %s", part, type(error).__name__)
    return GenerationFailedError(f"the model's {part} failed on this prompt")


def _require_unicode(text: str, param: str) -> str:
    """Return the text if it is valid Unicode.

    Raises:
        InvalidRequestError: It contains half a surrogate pair. JSON allows that, tokenizers do not.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the text is not valid Unicode", param) from error
    return text
