from dataclasses import replace
from io import BytesIO

from PIL import Image

from deployments.memory_plot import MAX_NUM_PANELS, draw_history
from tests.replica_reports import cpu_report, gpu_report


def size_of(png: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(png)) as image:
        assert image.format == "PNG"
        return image.size


def test_each_replica_has_a_panel_up_to_a_limit() -> None:
    replicas = [("m", gpu_report(str(i))) for i in range(MAX_NUM_PANELS + 3)]
    heights = [size_of(draw_history(replicas[:n]))[1] for n in (1, 2, MAX_NUM_PANELS, None)]
    assert heights[0] < heights[1] < heights[2] == heights[3]


def test_replicas_of_all_kinds_can_be_drawn() -> None:
    memory = gpu_report().memory
    without_figures = replace(memory, use=replace(memory.use, device_total_bytes=None))
    unknown = replace(gpu_report(), memory=without_figures)
    size_of(draw_history([("m", gpu_report()), ("c", cpu_report()), ("u", unknown)]))


def test_without_replicas_the_plot_says_so() -> None:
    assert size_of(draw_history([])) == size_of(draw_history([("m", cpu_report())]))
