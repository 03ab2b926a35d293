import json
from types import SimpleNamespace

import pytest
import ray
from ray import serve
from ray.exceptions import RayError

from deployments.contract.telemetry.start_progress import StartPhase, StartProgress
from deployments.replica import start_board
from deployments.replica.start_board import OLD_S, StartBoard, read_starts
from tests.failing import failing
from tests.ray.serve_run import wait_until

DEADLINE_S = 30


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Stand in for Ray's control service, and let this process be a replica of it."""
    store: dict[bytes, bytes] = {}

    def put(key: str, value: str, namespace: bytes) -> None:
        store[key.encode()] = value.encode()

    def remove(key: str | bytes, namespace: bytes) -> None:
        store.pop(key.encode() if isinstance(key, str) else key, None)

    monkeypatch.setattr(start_board, "_internal_kv_put", put)
    monkeypatch.setattr(start_board, "_internal_kv_del", remove)
    monkeypatch.setattr(start_board, "_internal_kv_get", lambda key, namespace: store.get(key))
    monkeypatch.setattr(
        start_board,
        "_internal_kv_list",
        lambda prefix, namespace: [key for key in store if key.startswith(prefix.encode())],
    )
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    context = SimpleNamespace(
        app_name="raystream", deployment="chat", replica_id=SimpleNamespace(unique_id="r1")
    )
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    return store


def test_a_start_is_read_while_it_lasts(store: dict[bytes, bytes]) -> None:
    progress = StartProgress("r1")
    board = StartBoard(progress, interval_s=0.001)
    progress.begin(StartPhase.LOADING, total_files=3)
    wait_until(lambda: b'"loading"' in b"".join(store.values()), DEADLINE_S)
    ((name, (report,)),) = read_starts("raystream").items()
    assert (name, report.replica_id, report.phase) == ("chat", "r1", StartPhase.LOADING)
    assert report.total_files == 3
    assert read_starts("another") == {}
    board.close()
    wait_until(lambda: not store, DEADLINE_S)
    assert read_starts("raystream") == {}


def test_the_report_of_a_replica_that_was_killed_is_removed_when_it_is_old(
    store: dict[bytes, bytes],
) -> None:
    board = StartBoard(StartProgress("r1"), interval_s=600)
    wait_until(lambda: bool(store), DEADLINE_S)
    ((key, value),) = store.items()
    told = json.loads(value)
    killed = key.replace(b"r1", b"r0")
    store[killed] = json.dumps({**told, "unix_s": told["unix_s"] - OLD_S}).encode()
    assert [each.replica_id for each in read_starts("raystream")["chat"]] == ["r1"]
    assert list(store) == [key]
    board.close()
    wait_until(lambda: not store, DEADLINE_S)


def test_a_control_service_that_does_not_answer_tells_nothing(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_board, "_internal_kv_list", failing(RayError("it is gone")))
    assert read_starts("raystream") == {}


def test_without_serve_nothing_is_written(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    StartBoard(StartProgress("r1")).close()
    assert store == {}
