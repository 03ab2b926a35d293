"""Generates answers to many questions at once, by stock ``generate``, and compares them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from PIL import Image
from torch import Tensor
from transformers import Gemma3Processor

from models.training.conversations import Conversation, Turn

_PADDING_SIDE: Final = "left"


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation whose last answer is generated, and the case that it counts for."""

    conversation: Conversation
    case: str

    @property
    def expected(self) -> str:
        """The right answer to the last turn."""
        return self.conversation.turns[-1].answer


@dataclass(frozen=True, slots=True)
class GeneratedAnswer:
    """A question and the text that the model generated."""

    question: Question
    text: str

    @property
    def is_exact(self) -> bool:
        """Whether the text is exactly the right answer."""
        return self.text == self.question.expected


class AnswerGenerator:
    """Generates answers with one model's ``generate`` and its processor."""

    def __init__(
        self,
        generate: Callable[..., Tensor],
        processor: Gemma3Processor,
        *,
        batch_size: int = 128,
        max_new_tokens: int = 96,
    ) -> None:
        """Answer in batches of `batch_size`, with at most `max_new_tokens` per answer."""
        self._generate = generate
        self._processor = processor
        self._batch_size = batch_size
        self._max_new_tokens = max_new_tokens

    def answer(
        self, questions: Sequence[Question], advance: Callable[[int], object] = lambda _: None
    ) -> list[GeneratedAnswer]:
        """Answer every question greedily; call `advance` with the size of each finished batch.

        Answers of similar length share a batch, which runs until its last answer ends.
        """
        ordered = sorted(questions, key=lambda question: len(question.expected))
        answers: list[GeneratedAnswer] = []
        for at in range(0, len(ordered), self._batch_size):
            batch = ordered[at : at + self._batch_size]
            answers += self._answer_batch(batch)
            advance(len(batch))
        return answers

    def _answer_batch(self, questions: Sequence[Question]) -> list[GeneratedAnswer]:
        messages = [as_messages(question.conversation) for question in questions]
        inputs: Any = self._processor.apply_chat_template(
            messages,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True, "padding_side": _PADDING_SIDE},
        )
        with torch.inference_mode():
            output = self._generate(**inputs, do_sample=False, max_new_tokens=self._max_new_tokens)
        answers = output[:, inputs["input_ids"].shape[1] :]
        decode: Callable[..., list[str]] = self._processor.batch_decode
        said = decode(answers, skip_special_tokens=True)
        return [
            GeneratedAnswer(question, text) for question, text in zip(questions, said, strict=True)
        ]


def as_messages(conversation: Conversation) -> list[dict[str, Any]]:
    """Return a conversation as chat messages, without its last answer."""
    messages: list[dict[str, Any]] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": [_text(conversation.system)]})
    for turn in conversation.turns:
        messages.append({"role": "user", "content": _parts(turn)})
        messages.append({"role": "assistant", "content": [_text(turn.answer)]})
    return messages[:-1]


def _parts(turn: Turn) -> list[dict[str, str | Image.Image]]:
    images: list[dict[str, str | Image.Image]] = [
        {"type": "image", "image": drawing.render()} for drawing in turn.drawings
    ]
    text = [_text(turn.question)]
    return [*images, *text] if turn.drawings_first else [*text, *images]


def _text(text: str) -> dict[str, str | Image.Image]:
    return {"type": "text", "text": text}
