from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from deployments.compute.gpu.launch import on_its_gpu
from tests.compute.gpu.gpu_or_interpreter import DEVICE, MATRIX_DTYPE, needs_kernels


class Guards:
    """The tensors whose GPUs were made the current one, and how many are now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = list[torch.Tensor]()
        self.depth = 0
        monkeypatch.setattr(torch.cuda, "device_of", self._guard)

    @contextmanager
    def _guard(self, tensor: torch.Tensor) -> Iterator[None]:
        self.entered.append(tensor)
        self.depth += 1
        yield
        self.depth -= 1


def test_a_function_runs_on_the_gpu_of_its_first_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(monkeypatch)

    @on_its_gpu
    def add(one: torch.Tensor, other: torch.Tensor, *, factor: int) -> torch.Tensor:
        assert guards.depth == 1
        return one + factor * other

    one, other = torch.tensor(2), torch.tensor(3)
    assert add(one, other, factor=4).item() == 14
    assert guards.entered == [one]
    assert guards.depth == 0
    assert add.__name__ == "add"


class WatchedKernel:
    """A kernel that notes the depth of the guards at each launch."""

    def __init__(self, kernel: Any, guards: Guards) -> None:
        self._kernel, self._guards = kernel, guards
        self.depths = list[int]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.depths.append(self._guards.depth)
            self._kernel[grid](*arguments, **options)

        return launch


class TestKernels:
    pytestmark = needs_kernels

    def test_every_kernel_is_launched_where_its_tensors_are(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from deployments.compute.gpu import ops, row_attention, row_products

        guards, watched = Guards(monkeypatch), list[WatchedKernel]()
        for module, names in (
            (ops, ("norm_rows", "rotate_both", "store_rows", "gate_rows")),
            (row_attention, ("attend_part", "add_parts")),
            (row_products, ("multiply_rows",)),
        ):
            for name in names:
                watched.append(WatchedKernel(getattr(module, name), guards))
                monkeypatch.setattr(module, name, watched[-1])
        monkeypatch.setattr(row_attention, "_num_parts", lambda *_: 2)
        made = partial(torch.ones, device=DEVICE)
        rows, weight, tables = made(1, 2, 16), made(16), made(1, 2, 16)
        heads, matrix = made(1, 3, 2, 16), made(2, 256, dtype=MATRIX_DTYPE)
        ops.rms_norm(rows, weight, 1e-6, is_shifted=False)
        ops.add_rms_norm(rows, rows, weight, 1e-6, is_shifted=False)
        ops.rotate(heads, tables, tables)
        ops.rotate_pair(heads, heads, tables, tables)
        ops.store(made(3, 2, 4), made(3, 2, 4), made(1).long(), made(1, 2, 4), made(1, 2, 4))
        ops.silu_mul(rows)
        ops.gelu_mul(rows)
        query, stored = (made(n, 2, 16, dtype=MATRIX_DTYPE) for n in (1, 40))
        row_attention.attend_rows(
            query, stored, stored, made(1).int(), made(1).int() * 39, 39, scale=None
        )
        row_products.multiply(matrix, made(64, 256, dtype=MATRIX_DTYPE))
        assert [len(kernel.depths) for kernel in watched] == [2, 2, 1, 2, 1, 1, 1]
        assert all(each == 1 for kernel in watched for each in kernel.depths)
