"""Finds the largest values of each row and their places, with a fixed order among equal values.

torch finds a maximum several times faster than its place or the largest few values. So the maxima
of blocks are computed first, and only blocks that can hold a result are searched.

Of equal values, the first always counts as the larger. Models in bfloat16 give many equal logits,
and which of them `topk` picks may depend on the other rows.
"""

import torch

from deployments.engine.sampling.block_reductions import BLOCK, maxima_of_blocks, places_in

_LOWEST = torch.iinfo(torch.int64).min


def argmax(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value and its first place; NaN counts as the largest.

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
    # Places past the end repeat the last value; argmax finds its first place.
    places = places_in(best).clamp_(max=length - 1)
    within = values.gather(-1, places).argmax(dim=-1, keepdim=True)
    return block_maxima.gather(-1, best)[:, 0], (best * BLOCK + within)[:, 0]


def stable_top_k(values: torch.Tensor, num: int) -> torch.Tensor:
    """Return the places of each row's largest values, largest first.

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
    # A block that holds one of the largest `num` values is among the first `num` blocks by maximum:
    # each block before it holds a larger value.
    maxima = maxima_of_blocks(values)
    at = torch.arange(maxima.shape[-1], device=values.device).expand(maxima.shape)
    places = places_in(_first_by_key(_keys(maxima, at), num))
    keys = _keys(values.gather(-1, places.clamp(max=length - 1)), places)
    return _first_by_key(keys.masked_fill_(places >= length, _LOWEST), num)


def _keys(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return integer keys ordered like the values; of equal values the first has the larger key."""
    # Adding 0 turns -0.0 into 0.0.
    bits = (values + 0.0).view(torch.int32)
    # Positive floats sort by their bits; for negative ones all bits but the sign are flipped.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.long() << 32) | (0xFFFFFFFF - places)


def _first_by_key(keys: torch.Tensor, num: int) -> torch.Tensor:
    """Return the places that the largest keys encode, largest first: [n, num]."""
    return 0xFFFFFFFF - (keys.topk(num, dim=-1).values & 0xFFFFFFFF)
