"""Launches kernels of Triton where their tensors are, whichever GPU is the current one."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def on_its_gpu(
    function: Callable[Concatenate[torch.Tensor, Parameters], Result],
) -> Callable[Concatenate[torch.Tensor, Parameters], Result]:
    """Make the GPU of a function's first argument the current one while the function runs.

    Triton launches on the current GPU and on the current stream there, and asks no tensor. With
    tensors of another one a kernel would read addresses that are not this GPU's.
    """

    @wraps(function)
    def run(tensor: torch.Tensor, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call] # torch leaves it untyped
            return function(tensor, *args, **kwargs)

    return run
