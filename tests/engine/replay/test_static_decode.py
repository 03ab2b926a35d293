import torch

from deployments.engine.attention.kv_cache import KVCache, KVShape
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.attention.step_reads import Starts
from deployments.engine.replay.static_decode import CpuStaticDecodeStep, CudaStaticDecodeStep
from deployments.plan.graph_sizes import DecodeBucket
from tests.engine.attention.extents import make_cache

WINDOW = 6


def cache() -> tuple[KVCache, list[Starts]]:
    """Return a cache for sequences of 20 tokens, of which the second layer keeps 6."""
    shape = KVShape((None, WINDOW), num_kv_heads=1, head_dim=2, dtype=torch.float32)
    return make_cache(shape, [20] * 3, max_model_len=20, block_size=4)


def step(kv: KVCache, starts: list[Starts], *lengths: int) -> CudaStaticDecodeStep:
    """Return a step of rows of these lengths; those of length 0 are padding."""
    rows = [own if n else kv.spare_tokens for own, n in zip(starts, lengths, strict=True)]
    bucket = DecodeBucket(len(lengths), read_length=16)
    return CudaStaticDecodeStep.of(kv, bucket, torch.tensor(lengths), torch.tensor(rows).T)


def test_a_row_sees_its_own_tokens_and_all_of_a_ring_that_has_wrapped() -> None:
    kv, starts = cache()
    made = step(kv, starts, 3, 0, 9)
    for group, (capacity, read_length) in enumerate(((20, 16), (WINDOW, WINDOW))):
        (span,) = made.decode_spans(capacity)
        assert span.rows == slice(0, 3)
        assert isinstance(span.tokens, torch.Tensor)
        assert span.tokens.shape == (3, read_length)
        assert span.mask is not None
        seen = span.mask[:, 0, 0]
        spare = kv.spare_tokens[group]
        firsts, counts = (starts[0][group], spare, starts[2][group]), (3, 1, min(9, read_length))
        for tokens, own, first, count in zip(span.tokens, seen, firsts, counts, strict=True):
            assert tokens[own].tolist() == list(range(first, first + count))
            assert set(tokens[~own].tolist()) <= {first + count - 1}
    assert made.positions.tolist() == [2, 0, 8]
    base = [starts[0][1], kv.spare_tokens[1], starts[2][1]]
    assert (made.decode_places(WINDOW).tokens - torch.tensor(base)).tolist() == [2, 0, 2]


def test_padding_changes_no_block() -> None:
    kv, starts = cache()
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(7.0)
    made, rows = step(kv, starts, 9, 0, 0), torch.full((3, 1, 2), torch.nan)
    rows[0] = 1.0
    for layer in (0, 1):
        made.store_decode(layer, rows, -rows)
    for layer, index in ((0, 8), (1, 8 % WINDOW)):
        for tensor, stored in ((kv.keys[layer], 1.0), (kv.values[layer], -1.0)):
            expected = torch.full_like(tensor, 7.0)
            expected[starts[0][layer] + index] = stored
            assert torch.equal(tensor[:-1], expected[:-1])


def test_rows_store_where_those_of_a_packed_step_do() -> None:
    (kv, starts), (other, _) = cache(), cache()
    rows = torch.arange(6.0).reshape(3, 1, 2) + 1
    static = step(kv, starts, 20, 5, 7)
    packed = PackedStep(other, tuple(starts), decode_positions=(19, 4, 6), chunks=())
    for layer in (0, 1):
        static.store_decode(layer, rows, -rows)
        packed.store_decode(layer, rows, -rows)
        for found, expected in ((kv.keys, other.keys), (kv.values, other.values)):
            assert found[layer].nansum() != 0
            torch.testing.assert_close(
                found[layer], expected[layer], rtol=0, atol=0, equal_nan=True
            )


def test_a_step_on_the_host_takes_another_steps_places_into_its_own_memory() -> None:
    kv, starts = cache()
    static = CpuStaticDecodeStep.of(kv, 2)
    packed = PackedStep(kv, (starts[0], starts[2]), decode_positions=(4, 9), chunks=())
    made = {capacity: static.decode_places(capacity).rows for capacity in kv.capacities}
    static.take(packed)
    for capacity, rows in made.items():
        taken = packed.decode_places(capacity).rows
        assert rows is not None
        assert taken is not None
        assert static.decode_places(capacity).rows is rows
        assert rows.addresses[0] == rows.places.ctypes.data != taken.addresses[0]
        assert (rows.places == taken.places).all()
    in_window = static.decode_places(WINDOW).rows
    assert in_window is not None
    assert in_window.places.tolist() == [[starts[0][1], starts[2][1]], [4, 9 % WINDOW], [5, WINDOW]]
