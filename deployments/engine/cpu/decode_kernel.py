"""The kernel of `decode_attention`, compiled by numba.

Sizes are constants of a kernel, so that its inner loops become vector instructions.
"""

from functools import cache

import numba
import numpy as np

from deployments.engine.cpu.compilation import Kernel, compile_kernel
from deployments.engine.cpu.float_bits import as_float32, fast_exp, like, pointer_to


@cache
def make_kernel(head_dim: int, num_heads: int, num_kv_heads: int, is_bfloat16: bool) -> Kernel:
    """Return the kernel for a shape, to be called as `decode_attention` does."""
    group = num_heads // num_kv_heads
    query_size, token_size = num_heads * head_dim, num_kv_heads * head_dim
    stored = np.uint16 if is_bfloat16 else np.float32
    itemsize = 2 if is_bfloat16 else 4

    def attend(queries, keys, values, outputs, slots, lengths, stride, scale, softcap):
        scores = np.empty((group, lengths.max()), np.float32)
        query = np.empty((group, head_dim), np.float32)
        total = np.empty((group, head_dim), np.float32)
        for row in range(len(slots)):
            length, at = lengths[row], itemsize * row * query_size
            source = numba.carray(pointer_to(queries + at), query_size, stored)
            target = numba.carray(pointer_to(outputs + at), query_size, stored)
            at = itemsize * slots[row] * stride
            key = numba.carray(pointer_to(keys + at), length * token_size, stored)
            value = numba.carray(pointer_to(values + at), length * token_size, stored)
            for kv_head in range(num_kv_heads):
                head, queried = kv_head * head_dim, kv_head * group * head_dim
                for g in range(group):
                    for d in range(head_dim):
                        query[g, d] = as_float32(source[queried + g * head_dim + d]) * scale
                _score(query, key, head, length, group, head_dim, token_size, scores)
                if softcap > 0:
                    _cap(scores, length, group, softcap)
                _normalize(scores, length, group)
                _weigh(scores, value, head, length, group, head_dim, token_size, total)
                for g in range(group):
                    for d in range(head_dim):
                        at = queried + g * head_dim + d
                        target[at] = like(target[at], total[g, d])

    kernel: Kernel = compile_kernel(attend, fastmath=True)
    return kernel


@numba.njit(inline="always", fastmath=True)
def _score(query, key, head, length, group, head_dim, token_size, scores):
    vector = np.empty(head_dim, np.float32)
    for token in range(length):
        for d in range(head_dim):
            vector[d] = as_float32(key[token * token_size + head + d])
        for g in range(group):
            score = np.float32(0)
            for d in range(head_dim):
                score += query[g, d] * vector[d]
            scores[g, token] = score


@numba.njit(inline="always", fastmath=True)
def _cap(scores, length, group, softcap):
    for g in range(group):
        for token in range(length):
            # tanh by the exponential of -2|x|, which can't overflow.
            x = scores[g, token] / softcap
            e = fast_exp(np.float32(-2) * abs(x))
            scores[g, token] = np.copysign(softcap * (1 - e) / (1 + e), x)


@numba.njit(inline="always", fastmath=True)
def _normalize(scores, length, group):
    for g in range(group):
        largest = scores[g, 0]
        for token in range(length):
            largest = max(largest, scores[g, token])
        norm = np.float32(0)
        for token in range(length):
            weight = fast_exp(scores[g, token] - largest)
            scores[g, token] = weight
            norm += weight
        for token in range(length):
            scores[g, token] /= norm


@numba.njit(inline="always", fastmath=True)
def _weigh(scores, value, head, length, group, head_dim, token_size, total):
    vector = np.empty(head_dim, np.float32)
    total[:] = 0
    for token in range(length):
        for d in range(head_dim):
            vector[d] = as_float32(value[token * token_size + head + d])
        for g in range(group):
            weight = scores[g, token]
            for d in range(head_dim):
                total[g, d] += weight * vector[d]
