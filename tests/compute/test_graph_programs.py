from collections.abc import Callable, Mapping

import pytest
import torch

from deployments.compute.graph_programs import NotProgrammableError, _KernelsOnly

SOMETIMES_COMPUTED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "reshape": lambda rows: rows.reshape(-1),
    "flatten": torch.Tensor.flatten,
    "to": torch.Tensor.bfloat16,
}


@pytest.mark.parametrize("name", SOMETIMES_COMPUTED)
def test_an_operator_that_sometimes_computes_is_refused_when_it_does(name: str) -> None:
    """After captured kernels it would compute only once, on memory that no kernel has written."""
    operator = SOMETIMES_COMPUTED[name]
    given = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    others = given.float() if name == "to" else given.transpose(1, 2)
    with torch.inference_mode(), _KernelsOnly():  # type: ignore[no-untyped-call] # torch leaves it untyped
        assert operator(given).data_ptr() == given.data_ptr()
        with pytest.raises(NotProgrammableError):
            operator(others)
