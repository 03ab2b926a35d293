"""Reads a run's questions from a file; a hundred ship with the tool.

Beside files of our own, ShareGPT's conversations and OpenAI's batches are read as they come.

Sources: https://huggingface.co/datasets/anon8231489123/ShareGPT_Vicuna_unfiltered and
https://platform.openai.com/docs/guides/batch
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

SHIPPED: Final = Path(__file__).with_name("questions.json")
"""A hundred questions about Python's standard library."""

_TEXT_KEYS: Final = ("prompt", "question", "text", "content", "input")
_BATCH_KEYS: Final = ("custom_id", "method", "url")
_ASKERS: Final = ("human", "user")


class QuestionsError(ValueError):
    """A file holds no valid questions; the message names the file and the line or item."""


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

    In JSON a question is one of these:

    - a text, or an object with `prompt`, `question`, `text`, `content`, `input` or `messages`;
    - ShareGPT's object with `conversations`: its first question, behind its system prompt if it
      has one. Conversations without a question are left out, as that collection has some;
    - a request of an OpenAI batch: the `messages`, `prompt` or `input` of its `body`. The other
      fields of the body are not sent.

    Raises:
        QuestionsError: The file can't be read, is of another form, or holds no question.
    """
    try:
        items = list(_items(path))
    except QuestionsError:
        raise
    except (OSError, ValueError) as error:
        raise QuestionsError(f"{path}: {error}") from None
    asked = (_question(item, place) for place, item in items)
    questions = tuple(question for question in asked if question is not None)
    if not questions:
        raise QuestionsError(f"{path} holds no questions")
    return questions


def _items(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each item behind its place: the file, and the line or the item's number."""
    text = path.read_text(encoding="utf-8-sig")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    match path.suffix:
        case ".json":
            items = _json(text, path)
            if not isinstance(items, list):
                raise ValueError("JSON, but not a list; a file of JSON lines ends in .jsonl")
            yield from ((f"{path}, item {number}", item) for number, item in enumerate(items, 1))
        case ".jsonl":
            yield from ((f"{path}, line {n}", _json(line, path, n)) for n, line in lines)
        case ".txt":
            yield from ((f"{path}, line {n}", line) for n, line in lines)
        case suffix:
            raise ValueError(f"{suffix!r} is not one of .json, .jsonl and .txt")


def _json(text: str, path: Path, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise QuestionsError(f"{path}, line {line}: not JSON: {error.msg}") from None


def _question(item: Any, place: str) -> Question | None:
    """Return an item's question; None if it is a conversation in which nothing is asked."""
    if isinstance(item, str):
        return Question(_not_blank(item, place))
    if not isinstance(item, dict):
        raise QuestionsError(f"{place}: neither a text nor an object")
    if item.get("conversations") is not None:
        return _first_asked(item["conversations"], place)
    if "custom_id" in item or isinstance(item.get("body"), dict):
        return _batched(item, place)
    if "messages" in item:
        return _conversation(item["messages"], place)
    for key in _TEXT_KEYS:
        if isinstance(text := item.get(key), str):
            return Question(_not_blank(text, place))
    raise QuestionsError(f"{place}: has none of {', '.join(_TEXT_KEYS)} and messages")


def _first_asked(turns: Any, place: str) -> Question | None:
    """Return the first question of ShareGPT's conversation; None if it has none."""
    if not isinstance(turns, list):
        raise QuestionsError(f"{place}: conversations is not a list of turns")
    system: tuple[Mapping[str, Any], ...] = ()
    for turn in turns:
        speaker, text = _turn(turn, place)
        if speaker == "system" and text.strip():
            system = ({"role": "system", "content": text},)
        if speaker in _ASKERS and text.strip():
            messages = (*system, {"role": "user", "content": text})
            return Question(text, messages if system else None)
    return None


def _turn(turn: Any, place: str) -> tuple[str, str]:
    """Return who speaks and what; some files have OpenAI's names for ShareGPT's."""
    if isinstance(turn, dict):
        speaker, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if isinstance(speaker, str) and isinstance(text, str):
            return speaker, text
    raise QuestionsError(f"{place}: a turn of conversations has no texts `from` and `value`")


def _batched(item: Mapping[str, Any], place: str) -> Question:
    """Return the question of a request in an OpenAI batch."""
    if missing := [key for key in _BATCH_KEYS if not isinstance(item.get(key), str)]:
        raise QuestionsError(f"{place}: a request of a batch without {', '.join(missing)}")
    body = item["body"]
    if not isinstance(body, dict):
        raise QuestionsError(f"{place}: body is not an object")
    for key in ("messages", "input", "prompt"):
        if isinstance(asked := body.get(key), str):
            return Question(_not_blank(asked, place))
        if key != "prompt" and isinstance(asked, list):
            return _conversation(asked, place, key)
    raise QuestionsError(f"{place}: body has no messages, and no text as prompt or input")


def _conversation(messages: Any, place: str, key: str = "messages") -> Question:
    is_list = isinstance(messages, list) and all(isinstance(each, dict) for each in messages)
    if not is_list or not messages:
        raise QuestionsError(f"{place}: {key} is not a list of messages")
    text = messages[-1].get("content")
    if not isinstance(text, str):
        raise QuestionsError(f"{place}: the last message's content is not a text")
    return Question(_not_blank(text, place), tuple(messages))


def _not_blank(text: str, place: str) -> str:
    if not text.strip():
        raise QuestionsError(f"{place}: an empty text")
    return text
