"""The shipped graph, whose replicas write down the GPU that Ray gives them.

`serve run` imports this module by the name in a test's configuration.
"""

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ray.serve import Application

from deployments.contract.model_spec import ModelSpec
from deployments.text_generator import TextGenerator
from serve_app import app

FOLDER = "RAYSTREAM_TEST_FAULTS_FOLDER"
"""The environment variable with the folder that replicas write to."""


class FakeGpuGenerator(TextGenerator):
    """Writes its process's id to a file named after the model and the GPUs that it may use."""

    def __init__(self, spec: ModelSpec) -> None:
        name = f"{spec.id} on {os.environ['CUDA_VISIBLE_DEVICES']}"
        super().__init__(spec)
        (Path(os.environ[FOLDER]) / "gpus" / name).write_text(str(os.getpid()))


def build(args: dict[str, Any]) -> Application:
    """Compose the shipped graph with these replicas."""
    with patch.object(app, "TextGenerator", FakeGpuGenerator):
        return app.build(args)
