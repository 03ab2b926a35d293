"""The measurement of turns; `python -m benchmarks.turns` is the same with a table and a plot."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from benchmarks.serving.timed_answer import DONE
from benchmarks.turns.__main__ import measured
from benchmarks.turns.client import Answer, Question
from benchmarks.turns.foresight import least_loads
from benchmarks.turns.report import (
    Report,
    Turn,
    num_turns_during,
    seconds_to_turn,
    steps_of,
    turns_of,
)
from benchmarks.turns.server import turns_configuration
from serve_app.commands.check.check import find_problems
from serve_app.commands.check.turns import light_groups_in
from tests.measured import Record

MIN_TURN_S = 10
"""The longest answers take longer on any machine, so streams are parked."""


def answer(model: str, sent_s: float, *tokens_s: float, parked_s: Sequence[float] = ()) -> Answer:
    """Return a whole answer whose tokens, and whose notices of parking, came at these times."""
    made = Answer(sent_s, 200, ended_s=tokens_s[-1], question=Question(model, 0))
    for number, time_s in enumerate(tokens_s, 1):
        message = {
            "choices": [{"delta": {"content": f"{number} "}}],
            "usage": {"completion_tokens": number},
        }
        made.lines.append((time_s, f"data: {json.dumps(message)}\n".encode()))
    made.lines += [(time_s, b": parked\n") for time_s in parked_s]
    made.lines.sort()
    made.lines.append((tokens_s[-1], DONE))
    return made


SWAPPED = [
    answer("A", 0, 1, 2, 21, 22, parked_s=(3,)),
    answer("B", 0, 10, 14),
    answer("B", 2, 11, 12),
]
"""A's stream is parked while B runs."""


def report_of(answers: Sequence[Answer], **texts: str) -> Report:
    expected = {each.question: each.text for each in answers}
    return Report(answers, expected | {Question(name, 0): text for name, text in texts.items()})


def test_an_order_with_foresight_loads_each_model_once_if_requests_may_wait() -> None:
    requests = [(model, float(at)) for at, model in enumerate("ABAAC")]
    assert least_loads(requests, 10) == 3
    assert least_loads(requests, 1.5) == 3, "A B B' C: the A's come while A runs, until B is due"
    assert least_loads([("A", 0), ("B", 1), ("A", 2), ("B", 3), ("A", 4)], 0.5) == 5


def test_a_request_that_comes_by_the_time_at_which_another_is_due_needs_no_load() -> None:
    assert least_loads([("A", 0), ("B", 6), ("A", 11)], 5) == 2
    assert least_loads([("A", 0), ("B", 6), ("A", 11.5)], 5) == 3


def test_turns_last_from_the_first_token_of_a_model_to_its_last_one() -> None:
    assert turns_of(SWAPPED) == [Turn("A", 1, 2), Turn("B", 10, 14), Turn("A", 21, 22)]


def test_an_answer_waits_for_its_first_token_and_whenever_it_is_parked() -> None:
    waits = SWAPPED[0].waits()
    assert [(each.began_s, each.ended_s, each.is_parked) for each in waits] == [
        (0, 1, False),
        (3, 21, True),
    ]
    assert [num_turns_during(each, turns_of(SWAPPED)) for each in waits] == [0, 1]
    repeated = answer("A", 0, 1, 9, parked_s=(3, 4)).waits()
    assert [each.seconds for each in repeated] == [1, 6], "it was parked once"


def test_a_stream_that_never_went_on_has_waited_until_its_end() -> None:
    cut = answer("A", 0, 1, 2, parked_s=(3,))
    cut.ended_s = 60
    assert cut.waits()[-1].seconds == 57


def test_a_request_waits_for_its_model_until_that_has_the_device() -> None:
    turns = turns_of(SWAPPED)
    assert seconds_to_turn("A", 1.5, turns) == 0
    assert seconds_to_turn("A", 3, turns) == 18
    assert seconds_to_turn("B", 30, turns) == 0, "it never ran again"


def test_the_table_says_which_bar_is_missed() -> None:
    assert all(row.is_met for row in report_of(SWAPPED).rows)
    different = {row.what: row for row in report_of(SWAPPED, B="other").rows}
    assert different["texts equal to an undisturbed run's: yes, no"].found == "1, 2"
    failed = Answer(1, 503, ended_s=2, question=Question("A", 0))
    failed.lines.append((2, DONE))
    rows = report_of([*SWAPPED, failed], A="1 2 3 4 ").rows
    assert [row.found for row in rows if not row.is_met] == ["3 of 4", "1"]


def test_loads_are_compared_with_the_least() -> None:
    found = {row.what: row.found for row in report_of(SWAPPED).rows}
    assert found["loads"] == "3 (2 swaps)"
    assert found["least possible loads"] == "2"
    assert found["seconds of a swap: median"] == "7.5 s"
    assert found["part of the time in which a model worked"] == "27%"
    too_many = [answer("AB"[at % 2], 0, at + 1) for at in range(5)]
    missed = [row.what for row in report_of(too_many).rows if not row.is_met]
    assert missed == ["loads beside the least possible"]


def test_the_plot_has_the_device_and_what_waits(tmp_path: Path) -> None:
    waits = [wait for each in SWAPPED for wait in each.waits()]
    assert steps_of(waits, 0.0) == ([0, 0, 1, 2, 3, 10, 11, 21], [0, 2, 1, 2, 3, 2, 1, 0])
    figure = report_of(SWAPPED).figure()
    figure.savefig(tmp_path / "turns.svg", format="svg")
    assert [each.get_title() for each in figure.axes] == [
        "Has the device",
        "Requests that wait",
        "Streams that are parked",
    ]


def test_models_that_sleep_lightly_have_room_beside_each_other() -> None:
    config = turns_configuration(Path("models"), ["a", "b"], 10, is_light=True)
    assert find_problems(yaml.safe_dump(config)) == []
    (application,) = config["applications"]
    assert light_groups_in(application) == {"device": ("a", "b")}
    assert all("ray_actor_options" not in each for each in application["deployments"][1:])


@pytest.mark.ray
@pytest.mark.soak
@pytest.mark.parametrize("is_light", [False, True], ids=["ends", "light"])
def test_thirty_clients_of_three_models_are_answered_in_turn(
    tmp_path: Path, record: Record, is_light: bool
) -> None:
    """The short twins are in `tests/scaling/turns`."""
    report = measured(180, 30, MIN_TURN_S, tmp_path, is_light=is_light)
    for row in report.rows:
        record(row.what, row.found)
    assert report.num_whole == report.num_equal == len(report.answers)
    assert {turn.model for turn in report.turns} == {"model-a", "model-b", "model-c"}
    assert any(wait.is_parked for wait in report.waits)
    assert report.most_turns <= 3
    assert report.num_loads <= 2 * report.least_loads
