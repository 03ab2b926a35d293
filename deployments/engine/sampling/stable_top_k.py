"""The largest of many numbers in each row, and where they stand.

To find the place of a maximum, or the largest few, torch looks at every number one by one; to find
a maximum alone it is several times faster. So the maxima of blocks come first, and only the blocks
that can hold what is looked for are looked into.

Of equal numbers the one that stands first counts as the larger, always: models in bfloat16 give
many equal logits, and what `topk` picks among equals may depend on the other rows.
"""

import torch

from deployments.engine.blocks import BLOCK, maxima_of_blocks, places_in

_LOWEST = torch.iinfo(torch.int64).min


def find_maxima(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value and the first place where it stands; NaN is the largest.

    Args:
        values: [n, length].

    Returns:
        Two tensors [n]: values of the same type, and places, int64.
    """
    length = values.shape[-1]
    if values.device.type != "cpu" or length < 2 * BLOCK:
        maxima = values.max(dim=-1)
        return maxima.values, maxima.indices
    block_maxima = maxima_of_blocks(values)
    best = block_maxima.argmax(dim=-1, keepdim=True)
    # Behind the end the last number stands again and again; the first time is what is found.
    places = places_in(best).clamp_(max=length - 1)
    within = values.gather(-1, places).argmax(dim=-1, keepdim=True)
    return block_maxima.gather(-1, best)[:, 0], (best * BLOCK + within)[:, 0]


def find_largest(values: torch.Tensor, num: int) -> torch.Tensor:
    """Return the places of each row's largest values, the largest first.

    Args:
        values: [n, length], float32.
        num: How many, at most `length`.

    Returns:
        [n, num], int64, on the same device.
    """
    length = values.shape[-1]
    if num == length:
        return values.sort(dim=-1, descending=True, stable=True).indices
    if 2 * num * BLOCK >= length:
        places = torch.arange(length, device=values.device).expand(values.shape)
        return _first_by_key(_keys(values, places), num)
    # A block with one of the largest `num` is among the first `num` blocks by their maxima: each
    # block before it holds a larger number.
    maxima = maxima_of_blocks(values)
    at = torch.arange(maxima.shape[-1], device=values.device).expand(maxima.shape)
    places = places_in(_first_by_key(_keys(maxima, at), num))
    keys = _keys(values.gather(-1, places.clamp(max=length - 1)), places)
    return _first_by_key(keys.masked_fill_(places >= length, _LOWEST), num)


def _keys(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of the values, and of equal ones against that of the places."""
    # Adding 0 makes minus zero zero.
    bits = (values + 0.0).view(torch.int32)
    # Positive floats are in the order of their bits; of negative ones all bits but the sign turn.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0xFFFFFFFF - places)


def _first_by_key(keys: torch.Tensor, num: int) -> torch.Tensor:
    """Return the places behind the largest keys, the largest first: [n, num]."""
    return 0xFFFFFFFF - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)
