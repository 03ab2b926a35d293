"""What runs goes on after a file that can't be served, and the server says what is wrong."""

import pytest

from tests.changing_server import ChangingServer
from tests.faults.served.answer import assert_equal
from tests.faults.served.conftest import run
from tests.faults.served.in_halves import CHAT
from tests.faults.served.sizes import DETECTOR, NUM_REPLICAS
from tests.faults.served.wrong_files import NOWHERE, Told, WrongFiles, wrong_files
from tests.measured import Record
from tests.ray.serve_run import Server

NONSENSE = "max_batch_size must be a whole number of at least 1, and is 'many'"


@pytest.fixture(scope="module")
def told(
    changing_server: ChangingServer, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> WrongFiles:
    return run(wrong_files(changing_server, tmp_path_factory.mktemp("wrong-files")))


def require_served(told: Told) -> None:
    """Fail unless the chat model answers, and the server says that all of its models do."""
    codes = {path: told.answers[path][0] for path in (CHAT, "/ready", "/health", "/v1/models")}
    assert set(codes.values()) == {200}, codes


def test_replicas_keep_their_settings_when_they_are_given_nonsense(told: WrongFiles) -> None:
    require_served(told.nonsense)
    assert told.nonsense.replicas == told.before.replicas
    assert told.nonsense.answers["/health"][1]["failed_deploy"] == (
        f"pydoc-chat: user_config: {NONSENSE}"
    )
    assert told.refused == [NONSENSE] * NUM_REPLICAS


def test_a_missing_folder_and_nonsense_are_refused_before_any_replica_stops(
    told: WrongFiles,
) -> None:
    require_served(told.missing)
    assert told.missing.replicas == told.before.replicas
    assert told.missing.answers["/health"][1]["failed_deploy"] == (
        f"pydoc-chat: user_config: {NONSENSE}; "
        f"pydoc-chat: can't load {NOWHERE!r}: there is no such folder"
    )
    assert_equal([told.answer], [told.expected])
    assert told.answer.lost_at == []


def test_ready_follows_the_replicas_after_a_deploy_that_failed(
    told: WrongFiles, record: Record
) -> None:
    assert told.missing.answers["/ready"] == (200, {"status": "ready"})
    assert told.unready == {"status": "not ready"}
    record("seconds until /ready told that both replicas were dead", round(told.silent_s, 2))
    record("seconds until others answered", round(told.restored_s, 1))


def test_a_model_that_can_not_start_harms_no_other_and_says_why(told: WrongFiles) -> None:
    for then in (told.damaged, told.typo):
        assert then.answers[CHAT][0] == 200
        status, models = then.answers["/v1/models"]
        states = {each["id"]: each["state"] for each in models["data"]}
        assert (status, states) == (200, {"pydoc-chat": "running", DETECTOR: "failed"})
        assert then.answers["/ready"][0] == 503
        assert (then.answers["/v1/classify"][0], then.retry_after) == (503, "5")
        why = f"The model {DETECTOR!r} has failed, and no replica of it runs: can't load"
        assert then.message("/v1/classify").startswith(why)
        assert "its weights are damaged" in then.message("/v1/classify")
        assert then.answers["/health"][0] == 503
        assert then.message("/health").startswith(f"{DETECTOR}: {why}")
    assert told.typo_message == (
        "Deploying app 'raystream' failed with exception:\n"
        "args.models[1].max_queud_requests: unknown key 'max_queud_requests': did you mean "
        "'max_queued_requests'?"
    )
