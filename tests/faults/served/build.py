"""The application under test: the shipped one, with replicas that some requests kill.

`serve run` imports this module by the name in the configuration that `conftest` writes.
"""

from unittest.mock import patch

from ray.serve import Application

from serve_app import app
from serve_app.config import AppConfig
from tests.faults.served.fragile_generator import FragileGenerator
from tests.faults.served.fragile_vllm import FragileVllm


def build(args: AppConfig) -> Application:
    """Compose the shipped graph with fragile replicas."""
    with (
        patch.object(app, "TextGenerator", FragileGenerator),
        patch.object(app, "VllmGenerator", FragileVllm),
    ):
        return app.build(args)
