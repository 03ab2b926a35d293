from pathlib import Path

import pytest

from benchmarks.classification.offline import our_runs
from benchmarks.embeddings import Round, build, table


def test_rates_and_ratios_are_medians_of_the_rounds() -> None:
    rounds = [
        Round(60.0, 66.0, {1: 57.0, 8: 60.0}),
        Round(40.0, 50.0, {1: 30.0, 8: 40.0}),
        Round(50.0, 55.0, {1: 49.0, 8: 49.0}),
    ]
    columns = [list(column.cells) for column in table(rounds, "float32", 32).columns]
    assert columns[0] == ["1", "8"]
    assert columns[1] == ["49.0", "49.0"]
    assert columns[2:4] == [["50.0"] * 2, ["0.95", "1.00"]]
    assert columns[4:] == [["55.0"] * 2, ["0.86", "0.89"]]


@pytest.mark.slow
def test_the_model_is_packed_and_gives_vectors_of_its_width(tmp_path: Path) -> None:
    with our_runs(str(build(tmp_path)), "embed", "float32") as (packed, in_lanes):
        for run in (packed, in_lanes):
            rows = run(["one text", "another"])
            assert isinstance(rows, list)
            assert len(rows) == 2
