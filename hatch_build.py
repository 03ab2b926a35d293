"""Puts what `raystream serve` serves without a file into the wheel, as a folder of `serve_app`.

An editable installation reads these files where they lie in the checkout, so it gets no copies.
"""

from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SHIPPED: Final = "serve_app/shipped"
"""Where `serve_app.shipped_files` looks for them."""

FILES: Final = ("serve_config.yaml", "serve.env", "requirements-vllm.lock")
MODELS: Final = "models/*/config.json"


class ShippedFiles(BuildHookInterface[Any]):
    """Adds the configuration, Serve's switches, vLLM's lock and the embedded models."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files to add; `version` is the kind of the build."""
        if version != "standard":
            return
        root = Path(self.root)
        models = sorted(str(config.parent.relative_to(root)) for config in root.glob(MODELS))
        for name in (*FILES, *models):
            build_data["force_include"][name] = f"{SHIPPED}/{name}"
