"""Code in LLVM's language, compiled for the processor that it is about to run on.

llvmlite comes with numba and brings all of LLVM, so no machine needs a compiler of its own.

Source: https://llvmlite.readthedocs.io/en/latest/user-guide/binding/
"""

import llvmlite.binding as llvm


class MachineCode:
    """The functions of a module. They live as long as this object does."""

    def __init__(self, source: str, *, optimize: bool) -> None:
        """Compile for this machine.

        Args:
            source: A module in LLVM's language.
            optimize: Whether LLVM shall improve the code first. What was written with an eye on
                registers and addresses stays as it is without.
        """
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(),
            features=llvm.get_host_cpu_features().flatten(),
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

    def address_of(self, name: str) -> int:
        """Return the address of a function."""
        address = self._engine.get_function_address(name)
        assert isinstance(address, int)
        return address
