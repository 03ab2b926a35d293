import csv
import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.classification import online, over_http
from benchmarks.classification.chart import Chart
from benchmarks.classification.designs import (
    ALL,
    CHOSEN_QUEUE_BATCHER,
    PIECES,
    QUEUE_BATCHERS,
    RAYSTREAM,
    SERVE_BATCH,
    Counts,
    running,
)
from benchmarks.classification.fake_device import CALL_S, TEXT_S, FakeDevice
from benchmarks.classification.load import Latencies
from benchmarks.classification.offline import Optimum
from benchmarks.classification.online import Measured, Window
from benchmarks.classification.shapes import MAX_MODEL_LEN, TINY, build
from benchmarks.classification.table import Figures

SVG = "{http://www.w3.org/2000/svg}"


def test_a_table_is_written_in_full_as_csv(tmp_path: Path) -> None:
    figures = Figures("name", "A title", ("design", "ms"), [("ours", 1.23456), ("theirs", 2)])
    with figures.write_csv(tmp_path).open(newline="") as file:
        assert list(csv.reader(file)) == [["design", "ms"], ["ours", "1.23456"], ["theirs", "2"]]
    assert [column.justify for column in figures.table.columns] == ["left", "right"]


@pytest.mark.parametrize(
    ("value", "text"), [(1.234, "1.23"), (12.34, "12.3"), (123.4, "123"), (7, "7"), ("-", "-")]
)
def test_numbers_have_three_significant_digits(value: float | str, text: str) -> None:
    figures = Figures("name", "A title", ("figure",), [(value,)])
    assert list(figures.table.columns[0].cells) == [text]


def test_a_chart_draws_each_line_with_its_numbers(tmp_path: Path) -> None:
    lines = {"one": [(0, 0), (100, 40)], "other": [(50, 20)]}
    chart = Chart("a < b", "users", "ms", lines)
    (axes,) = chart.figure().axes
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("a < b", "users", "ms")
    for line, (name, points) in zip(axes.get_lines(), lines.items(), strict=True):
        assert line.get_label() == name
        assert np.array_equal(np.asarray(line.get_xydata()), points)
    chart.save(tmp_path / "chart.svg")
    assert ElementTree.parse(tmp_path / "chart.svg").getroot().tag == f"{SVG}svg"


def test_the_matrix_is_that_of_the_queue_batcher_s_author() -> None:
    settings = {(design.max_batch_size, design.timeout_s) for design in QUEUE_BATCHERS}
    assert settings == {(size, wait) for size in (8, 16, 32) for wait in (0.5, 0.3, 0.1)}
    assert CHOSEN_QUEUE_BATCHER in QUEUE_BATCHERS
    assert len({design.path for design in ALL}) == len(ALL) == 12


async def test_each_baseline_runs_the_model_and_counts_its_pieces() -> None:
    for design in (CHOSEN_QUEUE_BATCHER, PIECES):
        counts = Counts()
        async with running(design, lambda texts: [len(text) for text in texts], counts) as classify:
            assert await classify(["a", "bb"]) == [1, 2]
        assert counts.pieces == 2
        assert counts.calls == (2 if design is PIECES else 1)


async def test_raystream_is_not_a_baseline() -> None:
    with pytest.raises(ValueError, match="not a baseline"):
        async with running(RAYSTREAM, lambda texts: texts, Counts()):
            pass


def test_the_fake_device_sleeps_for_the_call_and_for_each_text() -> None:
    slept = list[float]()
    device = FakeDevice(slept.append)
    assert len(device(["a"] * 8)) == 8
    device(["a"])
    assert slept == pytest.approx([CALL_S + 8 * TEXT_S, CALL_S + TEXT_S])
    assert (device.counts.calls, device.counts.pieces) == (2, 9)


def measured() -> list[Measured]:
    return [
        Measured(PIECES, 1, Latencies(2, [0.1, 0.3]), 1.0),
        Measured(RAYSTREAM, 1, Latencies(2, [0.1] * 6), 4.5),
        Measured(SERVE_BATCH, 1, Latencies(2, []), 2.0),
    ]


def test_the_matrix_has_a_row_per_cell_with_its_ratio_to_one_call_per_piece() -> None:
    figures = online.figures(measured(), "a model", Window(1, 2))
    assert figures.rows[0] == ("pieces", 1, 1.0, 200.0, pytest.approx(290), 1.0, 1.0)
    assert figures.rows[1] == ("raystream", 1, 3.0, 100.0, pytest.approx(100), 4.5, 3.0)
    assert math.isnan(float(figures.rows[2][3]))


def test_plots_have_a_line_per_design_that_has_answered() -> None:
    charts = online.charts(measured())
    assert list(charts) == ["online_rps", "online_p50", "online_p95"]
    assert charts["online_rps"].lines == {"pieces": [(1, 1.0)], "raystream": [(1, 3.0)]}
    ((users, p50),) = charts["online_p50"].lines["pieces"]
    assert (users, p50) == pytest.approx((1, 200))


def test_over_http_the_median_of_the_rounds_is_compared_with_batcher_and_optimum() -> None:
    runs = {
        CHOSEN_QUEUE_BATCHER.name: [Latencies(1, [0.1] * n) for n in (9, 10, 30)],
        "raystream": [Latencies(1, [0.1] * n) for n in (17, 18, 19)],
    }
    figures = over_http.figures(runs, "a model", 32, Optimum(20, 30))
    assert [row[1] for row in figures.rows] == [10, 18]
    assert [row[-3:] for row in figures.rows] == [(1.0, 0.5, 1 / 3), (1.8, 0.9, 0.6)]


def test_a_model_is_made_with_its_tokenizer_and_can_be_loaded(tmp_path: Path) -> None:
    folder = build(TINY, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    batch = tokenizer(["import os", "a much longer text"], padding=True, return_tensors="pt")
    assert model(**batch).logits.shape == (2, 2)
    assert tokenizer.decode(tokenizer("import os")["input_ids"]) == "<s>import os</s>"
    assert tokenizer.model_max_length == MAX_MODEL_LEN
