import json
import re
from collections.abc import Mapping
from functools import cache

import pytest
import yaml
from typer.testing import CliRunner

from deployments.plan.memory_budget import GIB
from k8s.gpu_configs import OVERLAYS, Model, on_gpus
from k8s.make_base import K8S, ROOT, on_cluster
from serve_app.commands.cli import app
from tests.hub_configs import config_file
from tests.k8s.renderings import rendering_of

PARTS = {
    "share": "share_bytes",
    "weights": "weight_bytes",
    "step": "step_bytes",
    "captured steps": "graph_bytes",
    "headroom": "headroom_bytes",
    "keys and values": "kv_bytes",
    "left": "left_bytes",
}
SIZES = ("max_model_len", "max_num_seqs")
PROCESSES_GIB = 4
"""What Ray's processes and a replica's libraries take of a pod's memory."""
OF_4096 = "sequences of 4096 tokens at once"


def told_figures(name: str, model: Model) -> dict[str, float]:
    """Return what the comment of an overlay says about a model."""
    text = (K8S / "overlays" / name / "workers.yaml").read_text(encoding="utf-8")
    lines = re.findall(rf"^#   {re.escape(model.id)}: (.+)$", text, re.MULTILINE)
    pairs = (part.rpartition(" ") for line in lines for part in line.split(", "))
    return {what: float(number) for what, _, number in pairs}


@cache
def planned_figures(name: str, model: Model) -> dict[str, float]:
    """Return what `raystream plan` prints about it."""
    options = ["--model", str(config_file(model.config)), "--share", str(min(1, model.num_gpus))]
    options += ["--gpu-memory", OVERLAYS[name].gpu_memory, "--json"]
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 0, result.output
    (plan,) = json.loads(result.stdout)["models"]
    assert plan["fits"]
    figures = {what: round(plan[key] / GIB, 2) for what, key in PARTS.items()}
    if model.tensor_parallel_size is not None:  # the rest vLLM measures
        return {"weights": figures["weights"]}
    if model.task == "classify":
        return figures
    return figures | {size: plan[size] for size in SIZES} | {OF_4096: plan["num_sequences"]["4096"]}


def test_comments_have_the_figures_of_the_plan() -> None:
    models = [(name, model) for name, overlay in OVERLAYS.items() for model in overlay.models]
    told = {(name, model.id): told_figures(name, model) for name, model in models}
    assert told == {(name, model.id): planned_figures(name, model) for name, model in models}


def test_models_of_a_card_leave_room_for_each_other() -> None:
    for name, overlay in OVERLAYS.items():
        assert sum(model.num_gpus for model in overlay.models) <= overlay.num_gpus, name
        text = (K8S / "overlays" / name / "workers.yaml").read_text(encoding="utf-8")
        assert overlay.gpu_memory in text or "gpu-single" in text, name


@pytest.mark.kubectl
def test_weights_pass_through_the_memory_of_the_pod() -> None:
    for name, overlay in OVERLAYS.items():
        pods = {pod["metadata"]["name"]: pod for pod in rendering_of(name).workers}
        spec = pods["gpu-workers"]["spec"]
        limit = _gib(spec["containers"][0]["resources"]["limits"]["memory"])
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        shared = _gib(volumes["shared-memory"]["emptyDir"]["sizeLimit"])
        weights = sum(planned_figures(name, model)["weights"] for model in overlay.models)
        assert limit >= weights + shared + PROCESSES_GIB, name


def _gib(text: str) -> int:
    return int(text.removesuffix("Gi"))


@pytest.mark.parametrize("name", OVERLAYS)
def test_only_models_and_where_they_run_differ_from_the_root(name: str) -> None:
    root = on_cluster(yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8")))
    ours = on_gpus(root, OVERLAYS[name])
    (theirs_app,), (ours_app,) = root["applications"], ours["applications"]
    assert _without(root, "applications") == _without(ours, "applications")
    assert _without(theirs_app["args"], "models") == _without(ours_app["args"], "models")
    templates = {entry["task"]: entry for entry in theirs_app["args"]["models"]}
    for entry in ours_app["args"]["models"]:
        template = templates[entry["task"]]
        changed = {key for key, value in entry.items() if value != template.get(key)}
        if entry.get("engine") == "vllm":
            changed -= {"engine", "engine_python", "engine_args", "num_threads"}
        assert changed <= {"id", "source", "revision", "device", "num_gpus", "num_cpus"}


def _without(mapping: Mapping[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in mapping.items() if name != key}
