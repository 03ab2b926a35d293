"""Compiles LLVM IR for the processor that it will run on, unless an earlier process has done so.

llvmlite contains all of LLVM, so no machine needs a compiler.

Source: https://llvmlite.readthedocs.io/en/latest/user-guide/binding/
"""

from collections.abc import Callable
from typing import Final, Self, TypeVar

import llvmlite
import llvmlite.binding as llvm

from deployments.compute.kept_files import KERNELS, source_digest
from deployments.plan.processor import features, target_features

T = TypeVar("T")

_KEPT: Final[list[llvm.ExecutionEngine]] = []
"""All that was compiled: an address does not keep what it points to. A cache that two threads miss
at once compiles twice and forgets the first, whose address is in use."""


class MachineCode:
    """The compiled functions of an LLVM module; they stay as long as the process."""

    def __init__(self, source: str, *, optimize: bool) -> None:
        """Compile for this machine.

        Args:
            source: A module as LLVM IR.
            optimize: Whether to run LLVM's optimizer. IR that was written for certain registers
                and addressing modes is better left as it is.
        """
        self._engine = _engine_of(source, lambda: source, optimize=optimize)

    @classmethod
    def emitted(cls, emit: Callable[[T], str], argument: T, *, optimize: bool) -> Self:
        """Compile what a function of this package emits; it is only called if there is no file.

        Args:
            emit: Returns a module as LLVM IR. It depends on nothing but its argument, this
                package's source and the processor.
            argument: Its `repr` tells all of it.
            optimize: As above.
        """
        named = f"{emit.__module__}.{emit.__qualname__}({argument!r}) of {source_digest()}"
        code = cls.__new__(cls)
        code._engine = _engine_of(named, lambda: emit(argument), optimize=optimize)
        return code

    def address_of(self, name: str) -> int:
        """Return the address of a function."""
        address = self._engine.get_function_address(name)
        assert isinstance(address, int)
        return address


def _engine_of(named: str, emit: Callable[[], str], *, optimize: bool) -> llvm.ExecutionEngine:
    """Return an engine that has a module's functions, from a file or else compiled into one.

    Args:
        named: Tells the module from all others.
        emit: Returns the module as LLVM IR.
        optimize: See `MachineCode`.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, instructions = llvm.get_host_cpu_name(), target_features(features())
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=instructions, opt=3
    )
    version = (llvmlite.__version__, llvm.llvm_version_info)
    key = repr((version, cpu, instructions, optimize, named)).encode()
    if (compiled := KERNELS.read(key)) is not None:
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(compiled))
    else:
        module = _checked(emit(), machine, optimize=optimize)
        engine = llvm.create_mcjit_compiler(module, machine)
        engine.set_object_cache(lambda _, content: KERNELS.write(key, content))
    engine.finalize_object()
    _KEPT.append(engine)
    return engine


def _checked(source: str, machine: llvm.TargetMachine, *, optimize: bool) -> llvm.ModuleRef:
    module = llvm.parse_assembly(source)
    module.verify()
    if optimize:
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
    return module
