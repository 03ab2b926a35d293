import os

import pytest
import yaml

from serve_app.commands.check import find_problems
from serve_app.commands.demo.server import DemoError, DemoServer, two_replicas
from serve_app.config import AppConfig
from serve_app.shipped_files import CONFIG


def test_its_configuration_is_the_shipped_one_with_two_replicas_of_one_model() -> None:
    shipped = yaml.safe_load(CONFIG.read_text())
    document = two_replicas(shipped, 1234)
    assert find_problems(yaml.safe_dump(document)) == []
    assert document["http_options"] == {"host": "127.0.0.1", "port": 1234}
    (application,) = document["applications"]
    (model,) = AppConfig.model_validate(application["args"]).models
    assert (model.id, model.device) == ("pydoc-chat", "cpu")
    replicas = {each["name"]: each["num_replicas"] for each in application["deployments"]}
    assert replicas == {"Ingress": 1, "pydoc-chat": 2}
    assert yaml.safe_load(CONFIG.read_text()) == shipped  # nothing of it was changed


def test_only_processes_of_its_own_server_are_killed() -> None:
    server = DemoServer("http://127.0.0.1:1", os.getpid())
    with pytest.raises(DemoError, match="does not belong"):
        server.kill_replica(1)
    with pytest.raises(DemoError):
        server.kill_replica(os.getppid())
