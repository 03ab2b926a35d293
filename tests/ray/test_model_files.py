from pathlib import Path

import pytest
import ray

from serve_app.backends.models import model_files
from serve_app.backends.models.model_files import RayNodes
from tests.deployments.tiny_folder import spec

DEADLINE_S = 240.0
"""How long a worker of Ray may import what it needs while the machine is busy."""


def test_each_node_says_what_is_wrong_with_a_model_there(
    base_url: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "NODES_TIMEOUT_S", DEADLINE_S)
    nodes = RayNodes()
    (resources,) = nodes.resources()
    assert resources["CPU"] == 4
    missing = spec("/nowhere/at/all")
    assert list(nodes.problems_elsewhere(missing)) == []  # there is only this one
    here, gone = ray.get_runtime_context().get_node_id(), "0" * 56
    (why,) = nodes.problems_at([here], missing)
    assert why == "can't load '/nowhere/at/all': there is no such folder"
    assert list(nodes.problems_at([here, gone], spec(tiny_folder))) == [None, None]


def test_a_node_that_does_not_answer_in_time_counts_once(
    base_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray may have the answer of this node at once, however short the time is.
    monkeypatch.setattr(ray, "wait", lambda asked, timeout: ([], asked))
    here = ray.get_runtime_context().get_node_id()
    problems = RayNodes().problems_at([here, here], spec("/nowhere/at/all"))
    assert list(problems) == [None, None]
