from hypothesis import given
from hypothesis import strategies as st

from deployments.plan.graph_sizes import DecodeBucket, DecodeBuckets

SIZES = st.builds(DecodeBuckets, max_rows=st.integers(1, 300), max_length=st.integers(1, 40_000))


def test_rows_are_rounded_to_few_sizes_and_lengths_to_powers_of_two() -> None:
    buckets = DecodeBuckets(max_rows=30, max_length=3000)
    covered = {(n, buckets.cover(n, 1).num_rows) for n in (1, 2, 3, 4, 5, 8, 9, 16, 25, 30)}
    assert covered == {
        (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (25, 30), (30, 30)
    }  # fmt: skip
    lengths = [buckets.cover(1, n).read_length for n in (1, 256, 257, 1024, 2048, 2049, 3000)]
    assert lengths == [256, 256, 512, 1024, 2048, 3000, 3000]


@given(SIZES, st.data())
def test_a_size_holds_what_it_covers_and_covers_itself(
    buckets: DecodeBuckets, data: st.DataObject
) -> None:
    num_rows = data.draw(st.integers(1, buckets.max_rows))
    length = data.draw(st.integers(1, buckets.max_length))
    bucket = buckets.cover(num_rows, length)
    assert num_rows <= bucket.num_rows <= buckets.max_rows
    assert length <= bucket.read_length <= buckets.max_length
    assert buckets.cover(bucket.num_rows, bucket.read_length) == bucket


@given(st.builds(DecodeBuckets, max_rows=st.integers(1, 40), max_length=st.integers(1, 3000)))
def test_num_sizes_counts_all_sizes_that_can_occur(buckets: DecodeBuckets) -> None:
    lengths = {*range(1, buckets.max_length, 256), buckets.max_length}
    sizes: set[DecodeBucket] = {
        buckets.cover(num_rows, length)
        for num_rows in range(1, buckets.max_rows + 1)
        for length in lengths
    }
    assert buckets.num_sizes == len(sizes)
