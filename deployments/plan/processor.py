"""What the processor can do.

ATEN_CPU_CAPABILITY takes instructions away from torch (avx2, default), and here from the kernels
that llvmlite emits, too. So a machine shows how it would run without them.
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import Final

CAPABILITY: Final = "ATEN_CPU_CAPABILITY"
"""The environment variable from which torch takes its instructions."""

TAKEN_AWAY: Final[Mapping[str, tuple[str, ...]]] = {
    "avx2": ("avx512", "amx"),
    "default": ("avx", "fma", "f16c", "amx"),
}
"""By the variable's value, how the names of the features begin that are not used."""


@cache
def features() -> Mapping[str, bool]:
    """Return LLVM's features of this processor, without those that ATEN_CPU_CAPABILITY takes."""
    # Imported here: a machine that computes on a GPU may lack llvmlite.
    import llvmlite.binding as llvm

    return usable(llvm.get_host_cpu_features(), os.environ.get(CAPABILITY, ""))


def usable(found: Mapping[str, bool], capability: str) -> Mapping[str, bool]:
    """Return a processor's features with False for those that a capability takes away."""
    taken = TAKEN_AWAY.get(capability, ())
    return {name: has and not name.startswith(taken) for name, has in found.items()}


def target_features(found: Mapping[str, bool]) -> str:
    """Return features as LLVM's target machine takes them.

    Those that are missing come last: one that is there brings back all that it needs.
    """
    ordered = sorted(found.items(), key=lambda item: not item[1])
    return ",".join(f"{'+' if has else '-'}{name}" for name, has in ordered)


def has_bfloat16() -> bool:
    """Return whether there is AVX512_BF16, which multiplies bfloat16 as fast as memory gives it."""
    return bool(features().get("avx512bf16"))
