from pathlib import Path

import ray

from serve_app.backends.models.model_files import RayNodes
from tests.deployments.tiny_folder import spec


def test_each_node_says_what_is_wrong_with_a_model_there(base_url: str, tiny_folder: Path) -> None:
    nodes = RayNodes()
    (resources,) = nodes.resources()
    assert resources["CPU"] == 4
    missing = spec("/nowhere/at/all")
    assert list(nodes.problems_elsewhere(missing)) == []  # there is only this one
    here, gone = ray.get_runtime_context().get_node_id(), "0" * 56
    (why,) = nodes.problems_at([here], missing)
    assert why == "can't load '/nowhere/at/all': there is no such folder"
    assert list(nodes.problems_at([here, gone], spec(tiny_folder))) == [None, None]
