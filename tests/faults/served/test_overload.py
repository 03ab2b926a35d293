"""Ten times as many clients as the replicas admit: clean refusals, whole answers."""

import json

import pytest

from tests.changing_server import ChangingServer
from tests.faults.served.answer import Answer, assert_equal
from tests.faults.served.crowd import NUM_CLIENTS, Pressed, pressed
from tests.measured import Record

MAX_GROWTH_BYTES = 100 * 2**20


def test_admitted_answers_are_equal_although_a_replica_dies(crowd: Pressed, record: Record) -> None:
    check_answers(crowd, record)


def test_refusals_are_clean(crowd: Pressed, record: Record) -> None:
    check_refusals(crowd, record)


def test_the_ingress_does_not_grow_with_the_crowd(crowd: Pressed, record: Record) -> None:
    record("growth of the ingress, MiB", round(crowd.growth_bytes / 2**20, 1))
    assert crowd.growth_bytes < MAX_GROWTH_BYTES


@pytest.mark.soak
@pytest.mark.usefixtures("replicas")
async def test_a_minute_of_it_changes_nothing(
    changing_server: ChangingServer, record: Record
) -> None:
    crowd = await pressed(changing_server, 60)
    check_answers(crowd, record)
    check_refusals(crowd, record)
    assert crowd.growth_bytes < MAX_GROWTH_BYTES


def check_answers(crowd: Pressed, record: Record) -> None:
    answers = crowd.crowd.answers
    assert_equal(answers, [crowd.expected] * len(answers))
    assert crowd.crowd.num_moved
    record("clients, answers, streams moved", (NUM_CLIENTS, len(answers), crowd.crowd.num_moved))


def check_refusals(crowd: Pressed, record: Record) -> None:
    refusals = crowd.crowd.refusals
    assert refusals
    assert [each.body for each in refusals if not is_clean(each)] == []
    record("refusals", len(refusals))


def is_clean(refusal: Answer) -> bool:
    code = json.loads(refusal.body)["error"]["code"]
    return code == "overloaded" and 1 <= int(refusal.headers["retry-after"]) <= 60
