"""Where the tests of Triton's kernels run: on a GPU, or in Triton's interpreter.

The interpreter is taken if there is no GPU, Triton is installed and TRITON_INTERPRET=1.
"""

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")

MATRIX_DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
"""Of products of matrices: the interpreter multiplies none of bfloat16."""

needs_kernels = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (HAS_GPU or IS_INTERPRETED), reason="there is no GPU"),
]
