import argparse
from pathlib import Path

import pytest
import yaml

from benchmarks.peers.serve_model import configuration
from serve_app.commands.check.check import find_problems


@pytest.mark.parametrize("task", ["generate", "classify"])
def test_the_configuration_passes_the_check_and_holds_one_model(task: str, tmp_path: Path) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    options = {"model": str(folder), "port": 8123, "task": task, "dtype": "bfloat16"}
    sizes = {"max_model_len": 512, "max_batched_tokens": None, "kv_cache_memory_bytes": 2**26}
    queues = {
        "max_num_seqs": 8,
        "max_queued_requests": 16,
        "quantization": "int4",
        "max_stall_ms": 300,
    }
    engine = {"engine": "raystream", "engine_python": None, "num_threads": "auto"}
    traces = {"otlp_endpoint": "http://127.0.0.1:4318"}
    config = configuration(argparse.Namespace(**options, **sizes, **queues, **engine, **traces))
    assert find_problems(yaml.safe_dump(config)) == []
    (application,) = config["applications"]
    assert [(m["id"], m["task"]) for m in application["args"]["models"]] == [("some-model", task)]
    assert [each["name"] for each in application["deployments"]] == ["Ingress", "some-model"]
