import json
from pathlib import Path

import pytest

from loadtest.load.questions import SHIPPED, Question, QuestionsError, read_questions
from tests.offenders import Offenders


def test_a_hundred_different_questions_ship_with_the_tool() -> None:
    questions = read_questions(SHIPPED)
    assert len(questions) == len({question.text for question in questions}) == 100


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.json", '["why?", {"question": "how?"}]'),
        ("q.jsonl", '"why?"\n\n{"prompt": "how?"}\n'),
        ("q.txt", "why?\n\nhow?\n"),
        ("q.json", '\ufeff["why?", "how?"]'),
    ],
)
def test_each_file_format_is_read(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    assert read_questions(tmp_path / name) == (Question("why?"), Question("how?"))


def test_a_conversation_s_question_is_its_last_message(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "why?"}]
    (tmp_path / "q.json").write_text(json.dumps([{"messages": messages}]))
    assert read_questions(tmp_path / "q.json") == (Question("why?", tuple(messages)),)


INVALID: list[tuple[str, str, str]] = [
    ("q.json", "{", "q.json: "),
    ("q.json", "{}", "not a list"),
    ("q.json", "[]", "holds no questions"),
    ("q.json", '["a", 1]', "item 2: neither a text nor an object"),
    ("q.json", '[{"query": "x"}]', "item 1: has none of prompt, question"),
    ("q.json", '[{"messages": []}]', "item 1: messages is not a list of messages"),
    (
        "q.json",
        '[{"messages": [{"content": [1]}]}]',
        "the last message's content is not a text",
    ),
    ("q.jsonl", '"a"\n" "', "item 2: an empty text"),
    ("q.csv", "a", "not one of .json, .jsonl and .txt"),
]


def test_an_invalid_file_is_refused_with_the_item(tmp_path: Path) -> None:
    with Offenders() as offenders:
        for name, content, said in INVALID:
            with offenders.case(name, content, said):
                (tmp_path / name).write_text(content)
                with pytest.raises(QuestionsError, match=said):
                    read_questions(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match=r"nowhere\.json"):
        read_questions(tmp_path / "nowhere.json")
