import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.contract.errors import ReplicaUnavailableError
from deployments.contract.model_spec import ModelSpec
from serve_app.backends.models import model_files
from serve_app.backends.models.model_files import FileDescriptions, unreadable
from serve_app.shipped_files import SHIPPED
from tests.deployments.tiny_folder import spec
from tests.serve_app.fake_nodes import Cluster
from tests.stopped_clock import Clock, settle

GOOD = spec(SHIPPED / "models/pydoc-chat", id="good")
MISSING = spec("/nowhere/at/all", id="missing")
NO_SUCH_FOLDER = "can't load '/nowhere/at/all': there is no such folder"


def test_models_that_can_be_read_here_pass_and_no_other_node_is_asked() -> None:
    cluster = Cluster(("nothing here",))
    classifier = spec(SHIPPED / "models/pydoc-detector", task="classify")
    embedder = spec(SHIPPED / "models/pydoc-search", task="embed")
    assert list(unreadable([GOOD, classifier, embedder], cluster)) == []
    assert cluster.asked == []


def test_each_model_that_no_node_can_read_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-type"}')
    unknown = spec(tmp_path, id="unknown", task="classify")
    pooler = spec("/nowhere/at/all", id="pooler", task="embed")
    found = list(unreadable([MISSING, GOOD, unknown, pooler], Cluster(("not here, either",))))
    first, second, third = found
    assert first == f"missing: {NO_SUCH_FOLDER}"
    assert second.startswith("unknown: can't load")
    assert third.startswith("pooler: can't load '/nowhere/at/all': there is no such folder")
    assert "\n" not in "".join(found)


def test_a_model_passes_if_another_node_can_read_it_and_the_rest_is_not_waited_for() -> None:
    cluster = Cluster(("not here", None, "nor here"))
    assert list(unreadable([MISSING], cluster)) == []
    assert cluster.asked == ["missing"] * 2


@pytest.mark.parametrize("nodes", [[], [{"CPU": 0.0, "GPU": 1.0}], [{"CPU": 8.0, "GPU": 0.5}]])
def test_a_model_that_no_node_of_today_can_hold_is_not_judged(
    nodes: Sequence[Mapping[str, float]],
) -> None:
    assert list(unreadable([replace(MISSING, num_gpus=1.0)], Cluster(nodes=nodes))) == []


def test_a_model_that_vllm_runs_is_refused_for_its_files_or_environment_but_not_for_its_type(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "new", "quantization_config": {"a": 1}}')
    quantized = spec(tmp_path, id="q", engine="vllm", engine_python=str(tmp_path / "env"))
    nowhere = spec("/nowhere/at/all", id="n", engine="vllm")
    first, second = unreadable([quantized, nowhere], Cluster(("not here, either",)))
    assert first.startswith("q: there is no environment of vLLM at ")
    assert second.startswith("n: can't load '/nowhere/at/all': there is no such folder")


class Tasks:
    """Stands in for Ray: each task ends when the test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: dict[str, asyncio.Future[str]] = {}
        monkeypatch.setattr(model_files, "_describe", self)

    async def remote(self, module: str, spec: ModelSpec) -> str:
        self.running[spec.id] = asyncio.get_running_loop().create_future()
        try:
            return await self.running[spec.id]
        finally:
            del self.running[spec.id]


def asked(*ids: str) -> list[asyncio.Task[object]]:
    """Ask for models' descriptions at the same time."""
    files = FileDescriptions({id_: spec("/nowhere/at/all", id=id_) for id_ in ids})
    return [asyncio.create_task(files.of(id_)) for id_ in ids]


async def test_models_are_described_one_after_the_other_although_one_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks = Tasks(monkeypatch)
    first, second, third = asked("a", "b", "c")
    await settle()
    assert tasks.running.keys() == {"a"}
    tasks.running["a"].set_result("an a")
    await settle()
    assert first.result() == "an a"
    assert tasks.running.keys() == {"b"}
    tasks.running["b"].set_exception(OSError("no such file"))
    await settle()
    assert isinstance(second.exception(), ReplicaUnavailableError)
    assert tasks.running.keys() == {"c"}
    tasks.running["c"].set_result("a c")
    assert await third == "a c"


async def test_a_model_whose_files_take_long_does_not_hold_up_the_others_for_long(
    monkeypatch: pytest.MonkeyPatch, advance: Clock
) -> None:
    tasks = Tasks(monkeypatch)
    first, second = asked("a", "b")
    await settle()
    advance(model_files.MAX_WAIT_S / 2)
    await settle()
    assert tasks.running.keys() == {"a"}
    advance(model_files.MAX_WAIT_S / 2)
    await settle()
    tasks.running["b"].set_result("a b")
    assert await second == "a b"
    assert tasks.running.keys() == {"a"}
    tasks.running["a"].set_result("an a")
    assert await first == "an a"
