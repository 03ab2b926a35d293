"""What the GPUs of the tool's machine did meanwhile, where there are any."""

from collections.abc import Mapping, Sequence
from typing import Any

from loadtest.page.chart import COLOURS, Chart, axis_of, layout_of


def gpu_chart(samples: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Draw each GPU's load and memory over time; None without samples.

    Args:
        samples: As `gpu.watched_gpus` takes them.
    """
    if not samples:
        return None
    gpus = sorted({int(sample["gpu"]) for sample in samples})
    traces = [
        {"type": "scatter", "mode": "lines", "name": f"GPU {gpu}", "legendgroup": str(gpu),
         "showlegend": axis == "", "yaxis": f"y{axis}",
         "line": {"color": COLOURS[index % len(COLOURS)], "width": 1.5},
         "x": [sample["t_s"] for sample in samples if sample["gpu"] == gpu],
         "y": [sample[key] for sample in samples if sample["gpu"] == gpu]}
        for index, gpu in enumerate(gpus)
        for axis, key in (("", "utilization_percent"), ("2", "memory_mib"), ("3", "power_w"))
    ]  # fmt: skip
    layout = layout_of(
        560,
        grid={"rows": 3, "columns": 1, "subplots": [["xy"], ["xy2"], ["xy3"]], "ygap": 0.12},
        xaxis=axis_of("seconds since the start of the run", rangemode="tozero"),
        yaxis=axis_of("busy, %", range=[0, 101]),
        yaxis2=axis_of("memory, MiB", rangemode="tozero"),
        yaxis3=axis_of("power, W", rangemode="tozero"),
    )
    text = (
        "As nvidia-smi told once a second, on the machine that sent the load: of use where the "
        "server runs there too."
    )
    return Chart("gpus", "GPUs", text, traces, layout)
