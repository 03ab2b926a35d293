"""Reads a run's questions from a file; a hundred ship with the tool."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SHIPPED: Final = Path(__file__).with_name("questions.json")
"""A hundred questions about Python's standard library."""

_TEXT_KEYS: Final = ("prompt", "question", "text", "content", "input")


class QuestionsError(ValueError):
    """A file holds no valid questions; the message names the file and the item."""


@dataclass(frozen=True, slots=True)
class Question:
    """A text, or a conversation that ends with one.

    Attributes:
        text: The question.
        messages: The conversation, if any; its last message is the question.
    """

    text: str
    messages: tuple[Mapping[str, Any], ...] | None = None


def read_questions(path: Path) -> tuple[Question, ...]:
    """Read a JSON list, a file of JSON lines, or a text file with one question per line.

    In JSON a question is a text, or an object with `prompt`, `question`, `text`, `content`, `input`
    or `messages`.

    Raises:
        QuestionsError: The file can't be read, is of another form, or holds no question.
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
            raise ValueError(f"{suffix!r} is not one of .json, .jsonl and .txt")
    if not isinstance(items, list):
        raise ValueError("JSON, but not a list")
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
    raise QuestionsError(f"{place}: has none of {', '.join(_TEXT_KEYS)} and messages")


def _conversation(messages: Any, place: str) -> Question:
    is_list = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if not is_list or not messages:
        raise QuestionsError(f"{place}: messages is not a list of messages")
    text = messages[-1].get("content")
    if not isinstance(text, str):
        raise QuestionsError(f"{place}: the last message's content is not a text")
    return Question(_not_blank(text, place), tuple(messages))


def _not_blank(text: str, place: str) -> str:
    if not text.strip():
        raise QuestionsError(f"{place}: an empty text")
    return text
