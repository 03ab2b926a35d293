from itertools import islice
from pathlib import Path

import pytest
from pydantic import ValidationError

from loadtest.mock.script import Behaviour, Fault, Script


def events(script: Script, num: int) -> list[int]:
    return [behaviour.num_events for behaviour in islice(iter(script.next, None), num)]


def test_behaviours_follow_each_other_and_start_again() -> None:
    script = Script(Behaviour(times=2, num_events=1), Behaviour(times=1, num_events=2))
    assert events(script, 7) == [1, 1, 2, 1, 1, 2, 1]


def test_a_behaviour_without_times_stays() -> None:
    script = Script(Behaviour(times=1, num_events=1), Behaviour(num_events=2))
    assert events(script, 4) == [1, 2, 2, 2]


@pytest.mark.parametrize("name", ["script.yml", "script.json"])
def test_a_script_is_read_from_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('[{"times": 1, "fault": "reset"}, {"first_token_ms": 5}]')
    script = Script.from_file(tmp_path / name)
    assert script.next() == Behaviour(times=1, fault=Fault.RESET)
    assert script.next() == Behaviour(first_token_ms=5)


def test_an_unknown_setting_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.yml").write_text("- {first_token: 5}\n")
    with pytest.raises(ValidationError, match="first_token"):
        Script.from_file(tmp_path / "script.yml")
