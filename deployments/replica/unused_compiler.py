"""Leaves torch's compiler out of a process that compiles nothing.

torch and transformers import `torch._dynamo` to tell the compiler how to treat a function, and with
it come 700 modules. Neither has a setting against it.
"""

import sys
import threading
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

import torch  # noqa: F401 - asks for its compiler only later

COMPILER: Final = "torch._dynamo"
MASKS: Final = "torch._dynamo._trace_wrapped_higher_order_op"
"""The one module inside the compiler that transformers needs, for masks; it works on its own."""


def leave_compiler_out() -> None:
    """Let modules import an `UnusedCompiler` from now on, unless torch's has been imported."""
    spec = None if COMPILER in sys.modules else find_spec(COMPILER)
    if spec is None:
        return
    unused = sys.modules[COMPILER] = UnusedCompiler(spec)
    import_module(MASKS)
    sys.meta_path.insert(0, InsideCompiler(unused))


class UnusedCompiler(ModuleType):
    """Stands for `torch._dynamo` until something asks for more of it than to be left alone.

    Its decorators tell the compiler how to treat a function, so they change nothing as long as
    nothing is compiled. Any other name, and any module inside, brings the real package, for good.
    """

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(COMPILER)
        self.__spec__ = spec
        self.__path__ = spec.submodule_search_locations or []
        self._leaving = threading.Lock()

    @staticmethod
    def allow_in_graph(function: Any) -> Any:
        """Return the function."""
        return function

    assume_constant_result = allow_in_graph

    @staticmethod
    def disable(function: Any = None, *_: object, **__: object) -> Any:
        """Return the function; without one, a decorator that does."""
        return UnusedCompiler.allow_in_graph if function is None else function

    def __getattr__(self, name: str) -> Any:
        """Import the real package, unless Python asks for what a module need not have."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.give_way(), name)

    def give_way(self) -> ModuleType:
        """Return the real package."""
        with self._leaving:  # not while it is imported: that waits for imports of other threads
            if sys.modules.get(COMPILER) is self:
                del sys.modules[COMPILER]
        real = import_module(COMPILER)
        # Python names a module inside its package when it loads it, and this one was loaded before.
        vars(real).setdefault(MASKS.rpartition(".")[2], sys.modules[MASKS])
        return real


class InsideCompiler(MetaPathFinder, Loader):
    """Finds modules inside the compiler while it is left out, and loads the real package first.

    Most of them are imported by then. Python would import such a module a second time, so this
    loader hands out the one that is there.
    """

    def __init__(self, unused: UnusedCompiler) -> None:
        self._unused = unused
        self._specs = dict[str, ModuleSpec | None]()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how to load a module, None if this finder has no part in that.

        It imports nothing: Python may hold the lock of all imports now, and another thread that
        waits for it may hold that of a module which the real package needs.
        """
        if name.rpartition(".")[0] != COMPILER or sys.modules.get(COMPILER) is not self._unused:
            return None
        is_there = PathFinder.find_spec(name, path, target) is not None
        return ModuleSpec(name, self) if is_there else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module, which runs once."""
        self._unused.give_way()
        module = import_module(spec.name)
        self._specs[spec.name] = module.__spec__  # Python replaces it now
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own attribute back; it has run already."""
        module.__spec__ = self._specs.pop(module.__name__)
