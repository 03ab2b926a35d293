"""The questions that a run asks: read from a file, or those that ship with the tool."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SHIPPED: Final = Path(__file__).with_name("questions.json")
"""A hundred questions about Python's standard library."""

_TEXT_KEYS: Final = ("prompt", "question", "text", "content", "input")


class QuestionsError(ValueError):
    """A file holds no questions; the message names the file and the place."""


@dataclass(frozen=True, slots=True)
class Question:
    """A text, or a conversation that ends with one.

    Attributes:
        text: The question.
        messages: The conversation, if there is one; its last message is the question.
    """

    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a JSON list, a file of JSON lines, or a text file with a question on each line.

    In JSON a question is a text, or an object with `prompt`, `question`, `text`, `content` or
    `input`, or with `messages`.

    Raises:
        QuestionsError: The file can't be read, is none of these, or holds no question.
    """
    try:
        items = _items(path)
    except (OSError, ValueError) as error:
        raise QuestionsError(f"{path}: {error}") from None
    questions = tuple(_question(item, f"{path}, item {n}") for n, item in enumerate(items, 1))
    if not questions:
        raise QuestionsError(f"{path} holds no questions")
    return questions


def _items(path: Path) -> list[Any]:
    text = path.read_text(encoding="utf-8-sig")
    lines = [line for line in text.split("\n") if line.strip()]
    match path.suffix:
        case ".json":
            items = json.loads(text)
        case ".jsonl":
            items = [json.loads(line) for line in lines]
        case ".txt":
            items = lines
        case suffix:
            raise ValueError(f"{suffix!r} is none of .json, .jsonl and .txt")
    if not isinstance(items, list):
        raise ValueError("JSON, but no list")
    return items


def _question(item: Any, place: str) -> Question:
    if isinstance(item, str):
        return Question(_not_blank(item, place))
    if not isinstance(item, dict):
        raise QuestionsError(f"{place}: neither a text nor an object")
    if "messages" in item:
        return _conversation(item["messages"], place)
    for key in _TEXT_KEYS:
        if isinstance(text := item.get(key), str):
            return Question(_not_blank(text, place))
    raise QuestionsError(f"{place}: none of {', '.join(_TEXT_KEYS)} and messages is there")


def _conversation(messages: Any, place: str) -> Question:
    is_list = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if not is_list or not messages:
        raise QuestionsError(f"{place}: messages is no list of messages")
    text = messages[-1].get("content")
    if not isinstance(text, str):
        raise QuestionsError(f"{place}: the last message's content is no text")
    return Question(_not_blank(text, place), tuple(messages))


def _not_blank(text: str, place: str) -> str:
    if not text.strip():
        raise QuestionsError(f"{place}: an empty text")
    return text
