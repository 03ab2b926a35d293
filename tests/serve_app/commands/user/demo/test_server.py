import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.free_port import free_port
from serve_app.commands.check.check import find_problems
from serve_app.commands.user.demo.server import (
    ONE_PLACE,
    TWO_REPLICAS,
    DemoError,
    DemoServer,
    demo_config,
    serving,
)
from serve_app.config import AppConfig
from serve_app.shipped_files import CONFIG
from tests.failing import failing


def test_its_configuration_is_the_shipped_one_with_two_replicas_of_one_model() -> None:
    shipped = yaml.safe_load(CONFIG.read_text())
    shipped["applications"][0]["args"]["auth"] = {"api_keys_file": "keys.yaml"}
    document = demo_config(shipped, 1234, TWO_REPLICAS)
    assert find_problems(yaml.safe_dump(document)) == []
    assert document["http_options"] == {"host": "127.0.0.1", "port": 1234}
    (application,) = document["applications"]
    (model,) = AppConfig.model_validate(application["args"]).models
    assert (model.id, model.device) == ("pydoc-chat", "cpu")
    replicas = {each["name"]: each["num_replicas"] for each in application["deployments"]}
    assert replicas == {"Ingress": 1, "pydoc-chat": 2}
    assert "auth" not in application["args"] or not application["args"]["auth"]
    shipped["applications"][0]["args"]["models"] = []
    with pytest.raises(DemoError, match="has no model pydoc-chat"):
        demo_config(shipped, 1234, TWO_REPLICAS)


def test_the_server_of_the_parking_demo_runs_one_text_at_a_time() -> None:
    document = demo_config(yaml.safe_load(CONFIG.read_text()), 1234, ONE_PLACE)
    assert find_problems(yaml.safe_dump(document)) == []
    (application,) = document["applications"]
    (model,) = AppConfig.model_validate(application["args"]).models
    assert model.max_num_seqs == 1
    assert application["deployments"][1]["num_replicas"] == 1


def test_a_server_that_ends_at_its_start_is_told_with_its_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    with subprocess.Popen(["true"]) as process:
        process.wait()
        server = DemoServer(f"http://127.0.0.1:{free_port()}", process, log)
        with pytest.raises(DemoError, match="did not start") as caught:
            server.wait_until_ready()
    assert str(caught.value).splitlines()[-1] == "line 99"
    assert "line 50" not in str(caught.value)


def test_a_machine_without_a_folder_for_files_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "tempfile.TemporaryDirectory",
        failing(FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")),
    )
    with (
        pytest.raises(DemoError, match=r"No usable temporary directory .*; set TMPDIR"),
        serving(lambda _: None),
    ):
        pytest.fail("it has no folder")
