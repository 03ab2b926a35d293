import json
from pathlib import Path

import pytest

from loadtest.load.questions import SHIPPED, Question, QuestionsError, read_questions
from tests.offenders import for_each


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


SHARED = [
    {
        "id": "a",
        "conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "."}],
    },
    {"id": "b", "conversations": []},
    {"id": "c", "conversations": [{"from": "gpt", "value": "I can't say."}]},
    {
        "id": "d",
        "conversations": [{"from": "gpt", "value": "Ask."}, {"from": "human", "value": "how?"}],
    },
    {"id": "e", "conversations": [{"role": "user", "content": "who?"}]},
    {"question": "which?", "body": "A post's text.", "conversations": None},
    {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "when?"}]},
]


@pytest.mark.parametrize("name", ["q.json", "q.jsonl"])
def test_sharegpt_is_asked_the_first_question_of_each_conversation(
    tmp_path: Path, name: str
) -> None:
    lines = "\n".join(map(json.dumps, SHARED))
    (tmp_path / name).write_text(lines if name == "q.jsonl" else json.dumps(SHARED))
    system = ({"role": "system", "content": "s"}, {"role": "user", "content": "when?"})
    assert read_questions(tmp_path / name) == (
        *(Question(text) for text in ("why?", "how?", "who?", "which?")),
        Question("when?", system),
    )


def test_an_openai_batch_is_asked_what_its_bodies_ask(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "why?"}]
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 5}),
        ("/v1/completions", {"model": "m", "prompt": "how?"}),
        ("/v1/responses", {"model": "m", "input": "who?"}),
        ("/v1/responses", {"model": "m", "input": messages}),
    ]
    lines = [
        json.dumps({"custom_id": f"request-{at}", "method": "POST", "url": url, "body": body})
        for at, (url, body) in enumerate(bodies)
    ]
    (tmp_path / "batch.jsonl").write_text("\n".join(lines) + "\n")
    asked = Question("why?", tuple(messages))
    assert read_questions(tmp_path / "batch.jsonl") == (
        asked,
        Question("how?"),
        Question("who?"),
        asked,
    )


@for_each(
    ("q.json", "{", "q.json, line 1: not JSON: "),
    ("q.json", "{}", "not a list"),
    ("q.json", "[]", "holds no questions"),
    ("q.json", '["a", 1]', "item 2: neither a text nor an object"),
    ("q.json", '[{"query": "x"}]', "item 1: has none of prompt, question"),
    ("q.json", '[{"messages": []}]', "item 1: messages is not a list of messages"),
    ("q.json", '[{"messages": [{"content": [1]}]}]', "the last message's content is not a text"),
    ("q.json", '[\n"a",\nb]', "q.json, line 3: not JSON: Expecting value"),
    ("q.jsonl", '"a"\n" "', "line 2: an empty text"),
    ("q.jsonl", '"a"\n\n{"prompt": "b"\n', "q.jsonl, line 3: not JSON: Expecting"),
    ("q.jsonl", '"a"\n{"conversations": 1}', "line 2: conversations is not a list of turns"),
    ("q.jsonl", '{"conversations": [{"from": "human"}]}', "line 1: a turn of conversations has no"),
    ("q.json", '[{"conversations": []}]', "holds no questions"),
    ("q.jsonl", '{"custom_id": "1", "body": {}}', "line 1: a request of a batch without method, u"),
    (
        "q.jsonl",
        '{"custom_id": "1", "method": "POST", "url": "/v1/x", "body": 1}',
        "line 1: body is not an object",
    ),
    (
        "q.jsonl",
        '{"custom_id": "1", "method": "POST", "url": "/v1/x", "body": {"input": ["a"]}}',
        "line 1: input is not a list of messages",
    ),
    (
        "q.jsonl",
        '{"custom_id": "1", "method": "POST", "url": "/v1/x", "body": {"model": "m"}}',
        "line 1: body has no messages, and no text as prompt or input",
    ),
    ("q.csv", "a", "not one of .json, .jsonl and .txt"),
)
def test_an_invalid_file_is_refused_with_the_line_or_item(
    name: str, content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(QuestionsError, match=said):
        read_questions(tmp_path / name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuestionsError, match=r"nowhere\.json"):
        read_questions(tmp_path / "nowhere.json")
