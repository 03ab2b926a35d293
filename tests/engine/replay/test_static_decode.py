import torch

from deployments.engine.attention.kv_slots import KVShape, KVSlots
from deployments.engine.attention.packed_step import PackedStep
from deployments.engine.replay.graph_sizes import DecodeBucket
from deployments.engine.replay.static_decode import CpuStaticDecodeStep, CudaStaticDecodeStep

WINDOW = 6


def slots() -> KVSlots:
    """Return 3 slots of 20 tokens, but of 6 in the second layer."""
    shape = KVShape((None, WINDOW), num_kv_heads=1, head_dim=2, dtype=torch.float32)
    return KVSlots(shape, num_slots=3, max_model_len=20, device=torch.device("cpu"))


def step(kv: KVSlots, *lengths: int) -> CudaStaticDecodeStep:
    bucket = DecodeBucket(len(lengths), read_length=16)
    return CudaStaticDecodeStep.of(kv, bucket, torch.tensor(lengths))


def test_a_row_sees_its_own_tokens_and_all_of_a_ring_that_has_wrapped() -> None:
    made = step(slots(), 3, 0, 9)
    for capacity, read_length in ((20, 16), (WINDOW, WINDOW)):
        (span,) = made.decode_spans(capacity)
        assert (span.rows, span.slots, span.read_length) == (slice(0, 3), slice(0, 3), read_length)
        assert span.mask is not None
        assert span.mask.sum(-1).flatten().tolist() == [3, 1, min(9, read_length)]
        assert bool(span.mask[..., 0].all())
    assert made.positions.tolist() == [2, 0, 8]
    assert made.decode_places(WINDOW).indices.tolist() == [2, 0, 2]


def test_padding_changes_no_slot() -> None:
    kv = slots()
    for tensor in (*kv.keys, *kv.values):
        tensor.fill_(7.0)
    made, rows = step(kv, 9, 0, 0), torch.full((3, 1, 2), torch.nan)
    rows[0] = 1.0
    for layer in (0, 1):
        made.store_decode(layer, rows, -rows)
    for layer, index in ((0, 8), (1, 8 % WINDOW)):
        for tensor, stored in ((kv.keys[layer], 1.0), (kv.values[layer], -1.0)):
            expected = torch.full_like(tensor, 7.0)
            expected[0, index] = stored
            assert torch.equal(tensor, expected)


def test_rows_store_where_those_of_a_packed_step_do() -> None:
    kv, other = slots(), slots()
    rows = torch.arange(6.0).reshape(3, 1, 2) + 1
    static = step(kv, 20, 5, 7)
    packed = PackedStep(kv=other, decode_slots=(0, 1, 2), decode_positions=(19, 4, 6), chunks=())
    for layer in (0, 1):
        static.store_decode(layer, rows, -rows)
        packed.store_decode(layer, rows, -rows)
        assert torch.equal(kv.keys[layer], other.keys[layer])
        assert torch.equal(kv.values[layer], other.values[layer])


def test_a_step_on_the_host_takes_another_steps_places_into_its_own_memory() -> None:
    kv = slots()
    static = CpuStaticDecodeStep.of(kv, 2)
    packed = PackedStep(kv=kv, decode_slots=(0, 2), decode_positions=(4, 9), chunks=())
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
    assert in_window.places[1].tolist() == [4, 9 % WINDOW]
