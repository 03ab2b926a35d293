"""Compiles LLVM IR for the processor that it will run on.

llvmlite contains all of LLVM, so no machine needs a compiler.

Source: https://llvmlite.readthedocs.io/en/latest/user-guide/binding/
"""

from typing import Final

import llvmlite.binding as llvm

from deployments.plan.processor import features, target_features

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
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(),
            features=target_features(features()),
            opt=3,
        )
        module = llvm.parse_assembly(source)
        module.verify()
        if optimize:
            options = llvm.create_pipeline_tuning_options(speed_level=3)
            builder = llvm.create_pass_builder(machine, options)
            builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        _KEPT.append(self._engine)

    def address_of(self, name: str) -> int:
        """Return the address of a function."""
        address = self._engine.get_function_address(name)
        assert isinstance(address, int)
        return address
