from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.backends.models.model_files import unreadable
from serve_app.shipped_files import SHIPPED
from tests.deployments.tiny_folder import spec
from tests.serve_app.fake_nodes import Cluster

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
