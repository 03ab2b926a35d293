"""The layout in which oneDNN packs a linear layer's weights on most processors.

The outputs are divided into blocks. A block holds all inputs, one word after the other: a float32,
or two neighbouring inputs in bfloat16. Each word is there once for each output of the block.
"""

import ctypes

import torch

BLOCK = 64
"""Outputs of a block."""

INPUT_BLOCK_BYTES = 64
"""oneDNN pads the inputs to a multiple of this."""


def packed_words(packed: torch.Tensor) -> torch.Tensor:
    """Return the words of a packed weight in place: int32 [blocks, words of inputs, BLOCK].

    The result does not keep the weight alive.
    """
    out_features, in_features = packed.shape
    num_bytes = packed.dtype.itemsize * packed.numel()
    memory = (ctypes.c_char * num_bytes).from_address(torch.ops.mkldnn.data_ptr(packed))
    words = torch.frombuffer(memory, dtype=torch.int32)
    return words.view(out_features // BLOCK, in_features * packed.dtype.itemsize // 4, BLOCK)


@torch.inference_mode()
def can_read(packed: torch.Tensor) -> bool:
    """Return whether a packed weight, [out_features, in_features], lies as `packed_words` says.

    oneDNN chooses a layout for the machine and the sizes, and does not report it. The sizes
    accepted here need no padding. The products of rows that are one at a single input, and zero
    elsewhere, tell this input's weights; they must lie where they are looked for.
    """
    out_features, in_features = packed.shape
    itemsize = packed.dtype.itemsize
    num_bytes = torch.ops.mkldnn._nbytes(packed)
    if (
        packed.dtype not in (torch.bfloat16, torch.float32)
        or out_features % BLOCK
        or in_features * itemsize % INPUT_BLOCK_BYTES
        or num_bytes != itemsize * packed.numel()
    ):
        return False
    middle, word = in_features // 2, 4 // itemsize
    inputs = torch.tensor([0, 1, middle, middle + 1, in_features - 2, in_features - 1])
    rows = torch.nn.functional.one_hot(inputs, in_features).to(packed.dtype)
    blocks = packed_words(packed).view(packed.dtype).view(-1, in_features // word, BLOCK, word)
    found = blocks[:, inputs // word, :, inputs % word].reshape(len(inputs), out_features)
    expected = torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")
    # Some processors take numbers below the smallest normal one for zero.
    return torch.allclose(found.float(), expected.float(), rtol=0, atol=2**-126)
