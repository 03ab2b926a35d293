"""Emits the attention of a group of queries, one block of tokens at a time.

As in flash attention, each query keeps its largest score so far and sums that are rescaled when
that score grows. A vector holds the scores of several tokens that are adjacent in memory. So the
keys of a vector's tokens are transposed in registers, and scores need no sum across a vector.

Loops over tokens are emitted as loops. Loops over lanes, heads of a group and vectors of a head are
unrolled, so that all sums stay in registers.

Products are those of words: a word of bfloat16 holds two neighbouring elements of a key, or the
same element of two neighbouring tokens' values. So the weights are rounded to the stored type, and
so are those that are summed for the norm.

Source: Dao et al., FlashAttention, 2022.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from llvmlite import ir

from deployments.compute.cpu.attention.head_shape import HeadShape
from deployments.compute.cpu.jit.vector_builder import F32, I32, I64, Value, VectorBuilder

BLOCK = 128
"""Tokens of a block, whose scores stay in the L1 cache."""

MAX_SUMS = {16: 28, 8: 12, 4: 24}
"""Vectors that fit into registers, by their lanes: AVX-512, AVX2 and others."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Addresses of the queries that share a key-value head, and of their sums so far, in float32.

    Attributes:
        query: [group, head_dim], elements of the stored type.
        totals: [group, head_dim], the sums of the weighted values.
        largest: [group], the largest score so far.
        norms: [group], the sums of the weights.
        sinks: [group], the attention sinks; None if the model has none.
    """

    query: Value
    totals: Value
    largest: Value
    norms: Value
    sinks: Value | None


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """A block of a row's tokens.

    Attributes:
        start: Index of the first token.
        count: Tokens in the block, at most `BLOCK`.
        length: Tokens that the row sees.
    """

    start: Value
    count: Value
    length: Value


class FlashAttentionEmitter:
    """Emits attention with a builder, for heads of one shape."""

    def __init__(self, builder: VectorBuilder, shape: HeadShape) -> None:
        """Emit the memory for the scores and rescaling factors of a block."""
        self._vectors = builder
        self._shape = shape
        self._lanes = shape.lanes
        self._scores = builder.array(shape.group * BLOCK)
        self._factors = builder.array(shape.group)

    def begin(self, group: QueryGroup) -> None:
        """Emit the clearing of the sums.

        A sink counts as a token that was seen before all others, and whose value is zero.
        """
        v, b, shape = self._vectors, self._vectors.builder, self._shape
        with v.loop(I64(shape.group * shape.head_dim), self._lanes) as number:
            v.store(v.constant(0), group.totals, b.mul(number, I64(4)))
        with v.loop(I64(shape.group), 1) as member:
            at = b.mul(member, I64(4))
            sink = None if group.sinks is None else v.load(F32, group.sinks, at)
            v.store(F32(-math.inf) if sink is None else sink, group.largest, at)
            v.store(F32(0 if sink is None else 1), group.norms, at)

    def add(
        self,
        group: QueryGroup,
        block: TokenBlock,
        keys: Value,
        values: Value,
        scale: Value,
        softcap: Value,
    ) -> None:
        """Emit the addition of a block to the sums.

        Args:
            group: The queries.
            block: The tokens.
            keys: Address of the head in the extent's first key.
            values: As keys.
            scale: Factor of the scores.
            softcap: Bound of the scores; 0 means no bound.
        """
        self._score(group, block, keys, scale, softcap)
        with self._vectors.loop(I64(self._shape.group), 1) as member:
            self._update_softmax(group, block, member)
        self._accumulate(group, block, values)

    def end(self, group: QueryGroup, target: Value) -> None:
        """Emit the division by the norms, and store the output."""
        v, b, head_dim = self._vectors, self._vectors.builder, self._shape.head_dim
        with v.loop(I64(self._shape.group), 1) as member:
            norm = v.splat(v.load(F32, group.norms, b.mul(member, I64(4))))
            with v.loop(I64(head_dim), self._lanes) as number:
                place = b.add(b.mul(member, I64(head_dim)), number)
                mean = b.fdiv(v.load(v.floats, group.totals, b.mul(place, I64(4))), norm)
                at = b.mul(place, I64(self._shape.itemsize))
                v.store(v.narrow(mean), target, at)

    def _score(
        self, group: QueryGroup, block: TokenBlock, head_keys: Value, scale: Value, softcap: Value
    ) -> None:
        """Emit the scores of the block's tokens for all queries, -inf past the row's length."""
        v, b = self._vectors, self._vectors.builder
        is_capped = b.fcmp_ordered(">", softcap, F32(0))
        lane_numbers = ir.Constant(ir.VectorType(I64, self._lanes), list(range(self._lanes)))
        with v.loop(block.count, self._lanes) as at:
            first = b.add(block.start, at)
            last = b.sub(block.length, I64(1))
            # Past `length` there may be other data, so idle lanes re-read the last token.
            tokens = [v.minimum(b.add(first, I64(i)), last) for i in range(self._lanes)]
            offsets = [b.mul(token, I64(self._shape.token_bytes)) for token in tokens]
            keys = [v.offset(head_keys, offset) for offset in offsets]
            is_seen = b.icmp_signed("<", b.add(v.splat(first), lane_numbers), v.splat(block.length))
            for heads in _chunks(self._shape.group, MAX_SUMS[self._lanes] - self._lanes):
                sums = self._products(group, keys, heads)
                for head, place in sums.items():
                    v.store(b.fmul(v.read(place), v.splat(scale)), place, 0)
                    with b.if_then(is_capped):
                        v.store(self._softcap(v.read(place), softcap), place, 0)
                    score = b.select(is_seen, v.read(place), v.constant(-math.inf))
                    v.store(score, self._scores, b.mul(b.add(at, I64(head * BLOCK)), I64(4)))

    def _products(
        self, group: QueryGroup, keys: Sequence[Value], heads: Sequence[int]
    ) -> dict[int, Value]:
        """Emit the products of a vector of keys with some heads' queries; return the variables."""
        v, b, shape = self._vectors, self._vectors.builder, self._shape
        sums = {head: v.variable(v.floats) for head in heads}
        for place in sums.values():
            v.store(v.constant(0), place, 0)
        with v.loop(I64(shape.head_bytes // 4), self._lanes) as word:
            at = b.mul(word, I64(4))
            columns = v.transpose([v.load(v.words, key, at) for key in keys])
            for number, column in enumerate(columns):
                for head, place in sums.items():
                    query_at = b.add(at, I64(head * shape.head_bytes + 4 * number))
                    query = v.splat(v.load(I32, group.query, query_at))
                    v.store(v.add_products(v.read(place), column, query), place, 0)
        return sums

    def _softcap(self, score: Value, softcap: Value) -> Value:
        """Emit softcap * tanh(score / softcap)."""
        b, cap = self._vectors.builder, self._vectors.splat(softcap)
        return b.fmul(cap, self._vectors.tanh(b.fdiv(score, cap)))

    def _update_softmax(self, group: QueryGroup, block: TokenBlock, member: Value) -> None:
        """Emit a query's online softmax: turn its scores into weights, and rescale its norm.

        The weights take the place of the scores; those of bfloat16 fill the first half of it.
        """
        v, b = self._vectors, self._vectors.builder
        scores = v.offset(self._scores, b.mul(member, I64(4 * BLOCK)))
        own = b.mul(member, I64(4))
        place = v.variable(v.floats)
        v.store(v.constant(-math.inf), place, 0)
        with v.loop(block.count, self._lanes) as number:
            score = v.load(v.floats, scores, b.mul(number, I64(4)))
            v.store(v.maximum(v.read(place), score), place, 0)
        before = v.load(F32, group.largest, own)
        found = v.intrinsic("llvm.vector.reduce.fmax", F32, v.read(place))
        largest = v.maximum(before, found)
        v.store(v.constant(0), place, 0)
        with v.loop(block.count, self._lanes) as number:
            at = b.mul(number, I64(4))
            weight = v.exp(b.fsub(v.load(v.floats, scores, at), v.splat(largest)))
            stored_at = b.mul(number, I64(self._shape.itemsize))
            v.store(v.narrow(weight), scores, stored_at)
            v.store(b.fadd(v.read(place), v.load_wide(scores, stored_at)), place, 0)
        factor = v.exp(b.fsub(before, largest))
        added = v.intrinsic("llvm.vector.reduce.fadd", F32, F32(0), v.read(place))
        norm = v.fma(v.load(F32, group.norms, own), factor, added)
        v.store(largest, group.largest, own)
        v.store(norm, group.norms, own)
        v.store(factor, self._factors, own)

    def _accumulate(self, group: QueryGroup, block: TokenBlock, head_values: Value) -> None:
        """Emit the addition of the block's weighted values to the rescaled totals."""
        v, shape, most = self._vectors, self._shape, MAX_SUMS[self._lanes]
        block_at = v.builder.mul(block.start, I64(shape.token_bytes))
        step = self._shape.word_elements
        for heads in _chunks(shape.group, most // (1 + step)):
            fitting = (most - len(heads)) // len(heads)  # weights need registers, too
            num_vectors = shape.head_dim // self._lanes
            width = max(n for n in range(step, fitting + 1, step) if num_vectors % n == 0)
            with v.loop(I64(shape.head_dim), self._lanes * width) as first:
                values = v.offset(head_values, block_at)
                self._accumulate_part(group, block, values, heads, first, width)

    def _accumulate_part(
        self,
        group: QueryGroup,
        block: TokenBlock,
        values: Value,
        heads: Sequence[int],
        first: Value,
        width: int,
    ) -> None:
        """Emit `_accumulate` for some heads and for `width` vectors of elements from `first` on."""
        v, b, shape = self._vectors, self._vectors.builder, self._shape
        places = {(head, n): v.variable(v.floats) for head in heads for n in range(width)}

        def total_at(head: int, n: int) -> Value:
            return b.mul(b.add(first, I64(head * shape.head_dim + n * self._lanes)), I64(4))

        for (head, n), place in places.items():
            factor = v.splat(v.load(F32, self._factors, 4 * head))
            total = v.load(v.floats, group.totals, total_at(head, n))
            v.store(b.fmul(total, factor), place, 0)
        last = b.sub(block.count, I64(1))
        with v.loop(block.count, shape.word_elements) as token:
            # A last token without a neighbour is read twice, the second time with almost no weight.
            tokens = [v.minimum(b.add(token, I64(i)), last) for i in range(shape.word_elements)]
            sources = [v.offset(values, b.mul(each, I64(shape.token_bytes))) for each in tokens]
            for n in range(0, width, shape.word_elements):
                at = b.mul(b.add(first, I64(n * self._lanes)), I64(shape.itemsize))
                columns = v.interleave([v.load(v.words, source, at) for source in sources])
                for part, column in enumerate(columns):
                    for head in heads:
                        weight_at = b.add(b.mul(token, I64(shape.itemsize)), I64(4 * head * BLOCK))
                        weight = v.splat(v.load(I32, self._scores, weight_at))
                        place = places[head, n + part]
                        v.store(v.add_products(v.read(place), column, weight), place, 0)
        for (head, n), place in places.items():
            v.store(v.read(place), group.totals, total_at(head, n))


def _chunks(count: int, most: int) -> Iterator[range]:
    """Yield ranges of about equal size, at most `most` each, that together are range(count)."""
    number = -(-count // most)
    size = -(-count // number)
    yield from (range(i, min(i + size, count)) for i in range(0, count, size))
