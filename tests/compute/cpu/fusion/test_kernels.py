import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import llvmlite.binding as llvm
import pytest

from deployments.compute.cpu.fusion.kernels import RowKernel


def test_code_that_two_threads_compile_at_once_stays_for_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = Barrier(2, timeout=60)
    compiled: list[weakref.ref[Any]] = []
    create = llvm.create_mcjit_compiler

    def noted(*args: Any) -> Any:
        engine = create(*args)
        compiled.append(weakref.ref(engine))
        return engine

    monkeypatch.setattr(llvm, "create_mcjit_compiler", noted)

    def emit(*_: object) -> None:
        together.wait()

    kernel = RowKernel((), emit)
    with ThreadPoolExecutor(2) as threads:
        addresses = {*threads.map(lambda _: kernel.address(is_bfloat16=False), range(2))}
    gc.collect()
    assert len(addresses) == len(compiled) == 2
    assert all(each() is not None for each in compiled)
