"""The application under test: the shipped one, with replicas that some requests kill.

`serve run` imports this module by the name in the configuration that `conftest` writes.
"""

from typing import Any
from unittest.mock import patch

from ray import serve
from ray.serve import Application

from serve_app import app
from tests.faults.served.fragile_generator import FragileGenerator
from tests.faults.served.fragile_vllm import FragileVllm
from tests.faults.served.sizes import DETECTOR

_deployment = serve.deployment


def build(args: dict[str, Any]) -> Application:
    """Compose the shipped graph with fragile replicas."""
    with (
        patch.object(app, "TextGenerator", FragileGenerator),
        patch.object(app, "VllmGenerator", FragileVllm),
        patch.object(serve, "deployment", _given_up_at_once),
    ):
        return app.build(args)


def _given_up_at_once(*, name: str, **options: Any) -> Any:
    """Let Serve give up the damaged model at its first failure.

    The other two starts, some ten seconds each, would show nothing more.
    """
    if name == DETECTOR:
        options["max_constructor_retry_count"] = 1
    return _deployment(name=name, **options)
