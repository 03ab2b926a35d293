"""Has vLLM's CPU build take what Ray calls GPUs for its devices; Python imports it at its start.

vLLM asks its platform by what name Ray counts devices, and the CPU's has none: so Ray starts no
worker for it. Everything else of these workers computes on a CPU as on GPUs. This folder is in the
PYTHONPATH of the tests' environment of vLLM, since replica, EngineCore and workers all ask.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

PLATFORM = "vllm.platforms.cpu"


class Finder(MetaPathFinder):
    """Finds one module, and changes it once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PLATFORM:
            return None
        sys.meta_path.remove(self)
        found = find_spec(fullname)
        assert found is not None
        assert found.loader is not None
        load = found.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            module.CpuPlatform.ray_device_key = "GPU"

        found.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return found


sys.meta_path.insert(0, Finder())
