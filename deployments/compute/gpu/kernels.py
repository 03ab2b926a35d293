"""Triton's kernels. Those of the fused operators round where torch's operators do.

Sizes of the model are constants; numbers of rows are only the grid, so that a kernel is compiled
once for a model.
"""

import triton
import triton.language as tl


@triton.jit
def rounded(values, dtype: tl.constexpr):
    """Round float32 to a narrower type, and return float32.

    A cast there and back would do, but the compiler drops such pairs. So bfloat16 is rounded by
    its bits, half to even.
    """
    result = values
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        result = tl.where(values == values, even.to(tl.float32, bitcast=True), values)
    return result


@triton.jit
def norm_rows(
    rows,
    others,
    weight,
    total,
    output,
    num_inner,
    outer_stride,
    inner_stride,
    others_stride,
    epsilon,
    width: tl.constexpr,
    block: tl.constexpr,
    is_sum: tl.constexpr,
    is_shifted: tl.constexpr,
):
    """Normalise a row by the root of its mean square; first add another one if is_sum."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    mask = at < width
    place = row // num_inner * outer_stride + row % num_inner * inner_stride
    values = tl.load(rows + place + at, mask=mask, other=0.0)
    dtype = values.dtype
    if is_sum:
        added = tl.load(others + row * others_stride + at, mask=mask, other=0.0)
        wide = rounded(values.to(tl.float32) + added.to(tl.float32), dtype)
        tl.store(total + row * width + at, wide.to(dtype), mask=mask)
    else:
        wide = values.to(tl.float32)
    root = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    factors = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    if is_shifted:  # noqa: SIM108 # a constant, by which Triton chooses one branch
        result = wide * root * (1.0 + factors)
    else:
        result = rounded(wide * root, dtype) * factors
    tl.store(output + row * width + at, rounded(result, dtype).to(dtype), mask=mask)


@triton.jit
def rotate_row(
    heads,
    cosines,
    sines,
    output,
    row,
    head_stride,
    row_stride,
    table_stride,
    num_heads: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    block_half: tl.constexpr,
):
    """Apply rotary positions to all heads of a row; the output is [n, num_heads, head_dim]."""
    head = tl.arange(0, block_heads)[:, None]
    at = tl.arange(0, block_half)[None, :]
    mask = (head < num_heads) & (at < half)
    source = heads + row * row_stride + head * head_stride + at
    low = tl.load(source, mask=mask, other=0.0)
    high = tl.load(source + half, mask=mask, other=0.0)
    dtype = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    table = row * table_stride + at
    in_half = at < half
    cos_low = tl.load(cosines + table, mask=in_half, other=0.0).to(tl.float32)
    cos_high = tl.load(cosines + table + half, mask=in_half, other=0.0).to(tl.float32)
    sin_low = tl.load(sines + table, mask=in_half, other=0.0).to(tl.float32)
    sin_high = tl.load(sines + table + half, mask=in_half, other=0.0).to(tl.float32)
    first = rounded(low * cos_low, dtype) - rounded(high * sin_low, dtype)
    second = rounded(high * cos_high, dtype) + rounded(low * sin_high, dtype)
    target = output + (row * num_heads + head) * 2 * half + at
    tl.store(target, rounded(first, dtype).to(dtype), mask=mask)
    tl.store(target + half, rounded(second, dtype).to(dtype), mask=mask)


@triton.jit
def rotate_both(
    heads,
    others,
    cosines,
    sines,
    output,
    others_output,
    head_stride,
    row_stride,
    others_head_stride,
    others_row_stride,
    table_stride,
    num_heads: tl.constexpr,
    num_others: tl.constexpr,
    half: tl.constexpr,
    block_heads: tl.constexpr,
    block_others: tl.constexpr,
    block_half: tl.constexpr,
):
    """Apply the same rotary positions to heads, and to others if the grid has two columns."""
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        rotate_row(
            heads,
            cosines,
            sines,
            output,
            row,
            head_stride,
            row_stride,
            table_stride,
            num_heads,
            half,
            block_heads,
            block_half,
        )
    else:
        rotate_row(
            others,
            cosines,
            sines,
            others_output,
            row,
            others_head_stride,
            others_row_stride,
            table_stride,
            num_others,
            half,
            block_others,
            block_half,
        )


@triton.jit
def store_rows(
    keys,
    values,
    places,
    new_keys,
    new_values,
    keys_stride,
    values_stride,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Store a row of keys or of values at its place."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, block)
    mask = at < width
    target = tl.load(places + row) * width + at
    if tl.program_id(1) == 0:
        tl.store(keys + target, tl.load(new_keys + row * keys_stride + at, mask=mask), mask=mask)
    else:
        new = tl.load(new_values + row * values_stride + at, mask=mask)
        tl.store(values + target, new, mask=mask)


@triton.jit
def gate_rows(
    joined, output, row_stride, width: tl.constexpr, block: tl.constexpr, is_gelu: tl.constexpr
):
    """Multiply the activated first half of a row by the second half."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    mask = at < width
    gate = tl.load(joined + row * row_stride + at, mask=mask, other=0.0)
    factor = tl.load(joined + row * row_stride + width + at, mask=mask, other=0.0)
    dtype = gate.dtype
    wide = gate.to(tl.float32)
    if is_gelu:
        # tanh(u) is 1 - 2 / (exp(2 u) + 1).
        inner = 1.5957691216057308 * (wide + 0.044715 * wide * wide * wide)
        active = wide * (1.0 - 1.0 / (tl.exp(inner) + 1.0))
    else:
        active = wide / (1.0 + tl.exp(-wide))
    result = rounded(active, dtype) * factor.to(tl.float32)
    tl.store(output + row * width + at, rounded(result, dtype).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_parts"])
def attend_part(
    query,
    keys,
    values,
    starts,
    lengths,
    output,
    most_scores,
    totals,
    factor,
    num_parts,
    query_stride,
    key_stride,
    value_stride,
    group: tl.constexpr,
    width: tl.constexpr,
    block_group: tl.constexpr,
    block_width: tl.constexpr,
    block_tokens: tl.constexpr,
    is_whole: tl.constexpr,
    is_wide: tl.constexpr,
):
    """Attend with a row's heads that share a head of keys to one part of its extent."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    part_tokens = tl.cdiv(tl.cdiv(length, block_tokens), num_parts) * block_tokens
    first = part * part_tokens
    end = tl.minimum(first + part_tokens, length)
    at_head, at = tl.arange(0, block_group), tl.arange(0, block_width)
    own = (at_head < group)[:, None] & (at < width)[None, :]
    places = (head * group + at_head)[:, None] * width + at[None, :]
    heads = tl.load(query + row.to(tl.int64) * query_stride + places, mask=own, other=0.0)
    start = tl.load(starts + row).to(tl.int64)
    keys += start * key_stride + head * width
    values += start * value_stride + head * width
    most = tl.full([block_group], float("-inf"), tl.float32)
    total = tl.zeros([block_group], tl.float32)
    sums = tl.zeros([block_group, block_width], tl.float32)
    for token in range(first, end, block_tokens):
        tokens = token + tl.arange(0, block_tokens)
        is_read = tokens < end
        if is_wide:  # 32 bits can't count the elements of an extent
            tokens = tokens.to(tl.int64)
        mask = is_read[:, None] & (at < width)[None, :]
        key = tl.load(keys + tokens[:, None] * key_stride + at[None, :], mask=mask, other=0.0)
        value = tl.load(values + tokens[:, None] * value_stride + at[None, :], mask=mask, other=0.0)
        scores = tl.dot(heads, tl.trans(key)) * factor
        scores = tl.where(is_read[None, :], scores, float("-inf"))
        new_most = tl.maximum(most, tl.max(scores, 1))
        shrink = tl.exp2(most - new_most)
        weights = tl.exp2(scores - new_most[:, None])
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        most = new_most
    num_heads = tl.num_programs(1) * group
    row_heads = row.to(tl.int64) * num_heads + head * group + at_head
    if is_whole:
        result = (sums / total[:, None]).to(heads.dtype)
        tl.store(output + row_heads[:, None] * width + at[None, :], result, mask=own)
    else:
        parts = row_heads * num_parts + part
        tl.store(output + parts[:, None] * width + at[None, :], sums, mask=own)
        tl.store(most_scores + parts, most, mask=at_head < group)
        tl.store(totals + parts, total, mask=at_head < group)


@triton.jit(do_not_specialize=["num_parts"])
def add_parts(
    sums,
    most_scores,
    totals,
    output,
    num_parts,
    width: tl.constexpr,
    block_parts: tl.constexpr,
    block_width: tl.constexpr,
):
    """Add the parts of a row's head."""
    row_head = tl.program_id(0).to(tl.int64)
    part, at = tl.arange(0, block_parts), tl.arange(0, block_width)
    is_part, is_own = part < num_parts, at < width
    parts = row_head * num_parts + part
    most = tl.load(most_scores + parts, mask=is_part, other=float("-inf"))
    weights = tl.exp2(most - tl.max(most, 0))
    total = tl.sum(weights * tl.load(totals + parts, mask=is_part, other=0.0), 0)
    mask = is_part[:, None] & is_own[None, :]
    values = tl.load(sums + parts[:, None] * width + at[None, :], mask=mask, other=0.0)
    result = tl.sum(values * weights[:, None], 0) / total
    tl.store(output + row_head * width + at, result.to(output.dtype.element_ty), mask=is_own)


@triton.jit(do_not_specialize=["num_rows"])
def multiply_rows(
    rows,
    weight,
    output,
    num_rows,
    width,
    num_inputs,
    block_rows: tl.constexpr,
    block: tl.constexpr,
    block_inputs: tl.constexpr,
):
    """Multiply few rows by a block of the weight's rows, of which each is read once."""
    own = tl.program_id(0) * block + tl.arange(0, block)
    row, at = tl.arange(0, block_rows), tl.arange(0, block_inputs)
    is_row = row < num_rows
    weights = weight + own[:, None].to(tl.int64) * num_inputs + at[None, :]
    inputs = rows + row[:, None] * num_inputs + at[None, :]
    sums = tl.zeros([block, block_rows], tl.float32)
    for start in range(0, num_inputs, block_inputs):
        factors = tl.load(weights + start, eviction_policy="evict_first")
        values = tl.load(inputs + start, mask=is_row[:, None], other=0.0)
        sums = tl.dot(factors, tl.trans(values), sums)
    target = output + row[None, :] * width + own[:, None]
    tl.store(target, sums.to(output.dtype.element_ty), mask=is_row[None, :])
