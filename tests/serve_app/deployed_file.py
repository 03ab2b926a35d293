"""An application of a file that was deployed."""

from typing import Any, Final

from ray.serve.schema import ServeApplicationSchema

ARGS: Final = {"models": [{"id": "a/m", "source": "models/pydoc-chat"}]}


def deployed(user_config: dict[str, Any] | None, **application: Any) -> ServeApplicationSchema:
    """Return one with a model `a/m`, and a section for its deployment."""
    section = {"name": "a--m", "user_config": user_config}
    return ServeApplicationSchema.model_validate(
        {"import_path": "a:b", "args": ARGS, "deployments": [{"name": "Ingress"}, section]}
        | application
    )
