import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.machinery import ModuleSpec
from threading import Barrier, BrokenBarrierError
from types import ModuleType, SimpleNamespace

import pytest

from deployments.replica import unused_compiler
from deployments.replica.unused_compiler import COMPILER, MASKS, UnusedCompiler

BEGINNING = """
import sys

import torch

from deployments.replica import own_actor
from deployments.replica.lean_imports import lean_imports
from deployments.replica.unused_compiler import UnusedCompiler

def is_left_out() -> bool:
    return isinstance(sys.modules.get("torch._dynamo"), UnusedCompiler)

own_actor.is_actor = lambda: True
"""
LEAN = (
    BEGINNING
    + """
with lean_imports():
    from transformers import masking_utils
assert is_left_out() and "sympy" not in sys.modules
"""
)
PROGRAMS = {
    "what compiles has the real one": LEAN
    + """
assert torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2)).tolist() == [1, 1]
assert not is_left_out()
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
assert TransformGetItemToIndex is masking_utils.TransformGetItemToIndex
masks = torch._dynamo._trace_wrapped_higher_order_op
assert masks.TransformGetItemToIndex is TransformGetItemToIndex
""",
    "its submodules are those of the real one": LEAN
    + """
import torch._dynamo.eval_frame
assert not is_left_out()
assert torch._dynamo.eval_frame is sys.modules["torch._dynamo.eval_frame"]
assert torch._dynamo.eval_frame.OptimizedModule is torch._dynamo.OptimizedModule
assert torch._dynamo.eval_frame.__spec__.origin == torch._dynamo.eval_frame.__file__
""",
    "the lock of all imports is free while the real one is imported": LEAN
    + """
import _imp

give_way, were_held = UnusedCompiler.give_way, []

def noted(self):
    were_held.append(_imp.lock_held())
    return give_way(self)

UnusedCompiler.give_way = noted
import torch._dynamo.repro.after_dynamo
assert were_held and not any(were_held), were_held
assert not is_left_out()
""",
    "one that is there stays": BEGINNING
    + """
import torch._dynamo as before
with lean_imports():
    import torch._dynamo as inside
assert before is inside and not is_left_out()
""",
    "others import as ever": BEGINNING
    + """
own_actor.is_actor = lambda: False
with lean_imports():
    assert "torch._dynamo" not in sys.modules
    from transformers.utils import is_torch_distributed_available
    assert is_torch_distributed_available()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=list(PROGRAMS))
def test_the_compiler_is_left_out_until_it_is_used(program: str) -> None:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_decorator_of_the_compiler_left_out_changes_nothing() -> None:
    unused = UnusedCompiler(ModuleSpec(COMPILER, None))
    decorators = (
        unused.allow_in_graph,
        unused.assume_constant_result,
        unused.disable,
        unused.disable(recursive=False, reason="none"),
        lambda function: unused.disable(function, False, wrapping=False),
    )
    for decorate in decorators:
        assert decorate(print) is print
    assert not hasattr(unused, "__file__")


class MeetingModules(dict[str, ModuleType]):
    """Modules that two threads look up at the same time, if nothing keeps one of them out."""

    def __init__(self) -> None:
        self._meeting = Barrier(2)

    def get(self, name: str, default: object = None) -> object:  # type: ignore[override]
        found = super().get(name, default)
        with suppress(BrokenBarrierError):
            self._meeting.wait(timeout=1)
        return found


def test_threads_that_ask_for_the_compiler_at_once_both_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unused, real = UnusedCompiler(ModuleSpec(COMPILER, None)), ModuleType(COMPILER)
    modules = MeetingModules()
    modules.update({COMPILER: unused, MASKS: ModuleType(MASKS)})
    monkeypatch.setattr(unused_compiler, "sys", SimpleNamespace(modules=modules))
    monkeypatch.setattr(unused_compiler, "import_module", lambda name: real)
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(unused.give_way) for _ in range(2)]
    assert [each.result() for each in found] == [real, real]
