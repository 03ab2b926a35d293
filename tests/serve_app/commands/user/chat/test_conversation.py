import json
from pathlib import Path

import pytest

from serve_app.commands.user.chat.conversation import Conversation


def test_the_next_question_brings_all_turns_and_the_given_settings_only() -> None:
    talk = Conversation("m", {"temperature": 0.0, "seed": None}, "Be brief.")
    talk.ask("One?")
    talk.answered("1")
    talk.ask("Two?")
    assert talk.body() == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "Two?"},
        ],
        "temperature": 0.0,
    }


def test_a_question_without_an_answer_is_forgotten() -> None:
    talk = Conversation("m")
    talk.ask("One?")
    talk.answered("")
    assert talk.messages == []


def test_it_is_saved_as_a_request_and_never_over_another_file(tmp_path: Path) -> None:
    talk = Conversation("m")
    talk.ask("Grüße?")
    talk.save(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text()) == talk.body()
    with pytest.raises(FileExistsError):
        talk.save(tmp_path / "talk.json")
