"""From conversations to tensors: token ids, labels on the answers only, pixels.

The chat template's rendering is repeated here, so that each token is known to belong to a question
or to an answer. A test compares it with the template.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import Gemma3Processor

from models.training.conversations import Conversation, Turn
from models.training.drawings import Drawing
from models.training.tokenizer import BOS, END_OF_TURN, START_OF_IMAGE, START_OF_TURN

IGNORED: Final = -100
"""Label of a token that is not learned; the default ``ignore_index`` of torch's cross entropy."""


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation as token ids, each with its successor as label."""

    token_ids: list[int]
    labels: list[int]
    drawings: tuple[Drawing, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded examples, on the CPU.

    Attributes:
        token_ids: [batch, length], int64, padded on the right.
        attention_mask: [batch, length], int64, 0 on padding.
        labels: [batch, length], int64: the next token where it is learned, else IGNORED.
        pixel_values: [images, 3, side, side], float32, or None without images.
        image_mask: [batch, length], int64, 1 on image tokens.
        drawings: The images' drawings, in order.
    """

    token_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    pixel_values: Tensor | None
    image_mask: Tensor
    drawings: tuple[Drawing, ...]


class Renderer:
    """Turns conversations into examples and batches, with one processor."""

    def __init__(self, processor: Gemma3Processor) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._cache: dict[str, list[int]] = {}

    def example(self, conversation: Conversation) -> Example:
        """Tokenize a conversation."""
        token_ids: list[int] = []
        answered: list[bool] = []
        for text, is_answer in pieces(conversation):
            piece = self._tokenize(text, keep=is_answer)
            token_ids += piece
            answered += [is_answer] * len(piece)
        successors = zip(token_ids[1:], answered[1:], strict=True)
        labels = [token_id if learned else IGNORED for token_id, learned in successors]
        drawings = tuple(drawing for turn in conversation.turns for drawing in turn.drawings)
        return Example(token_ids[:-1], labels, drawings)

    def batch(self, examples: Sequence[Example]) -> Batch:
        """Pad examples to the longest one and prepare their pixels."""
        token_ids = _padded(
            [example.token_ids for example in examples], self._tokenizer.pad_token_id
        )
        lengths = torch.tensor([len(example.token_ids) for example in examples])
        drawings = tuple(drawing for example in examples for drawing in example.drawings)
        return Batch(
            token_ids=token_ids,
            attention_mask=(torch.arange(token_ids.shape[1]) < lengths[:, None]).long(),
            labels=_padded([example.labels for example in examples], IGNORED),
            pixel_values=self.pixels(drawings) if drawings else None,
            image_mask=(token_ids == self._tokenizer.image_token_id).long(),
            drawings=drawings,
        )

    def pixels(self, drawings: Sequence[Drawing]) -> Tensor:
        """Return the prepared images: [images, 3, side, side], float32."""
        images = [drawing.render() for drawing in drawings]
        prepared = self._processor.image_processor(images, return_tensors="pt")
        pixel_values: Tensor = prepared["pixel_values"]
        return pixel_values

    def _tokenize(self, text: str, *, keep: bool) -> list[int]:
        if text in self._cache:
            return self._cache[text]
        expanded = text.replace(START_OF_IMAGE, self._processor.full_image_sequence)
        token_ids: list[int] = self._tokenizer(expanded, add_special_tokens=False)["input_ids"]
        if keep:
            self._cache[text] = token_ids
        return token_ids


def pieces(conversation: Conversation) -> list[tuple[str, bool]]:
    """Split a conversation's text into pairs of text and whether the model writes it."""
    system = "" if conversation.system is None else f"{conversation.system}\n\n"
    found: list[tuple[str, bool]] = []
    opening = BOS
    for turn in conversation.turns:
        asked = (
            f"{START_OF_TURN}user\n{system}{_question(turn)}{END_OF_TURN}\n{START_OF_TURN}model\n"
        )
        found += [(opening + asked, False), (turn.answer + END_OF_TURN, True)]
        opening, system = "\n", ""
    return found


def _question(turn: Turn) -> str:
    images = START_OF_IMAGE * len(turn.drawings)
    return images + turn.question if turn.drawings_first else turn.question + images


def _padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([[*row, *([filler] * (width - len(row)))] for row in rows])
