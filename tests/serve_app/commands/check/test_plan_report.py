import json
from pathlib import Path

import yaml

from deployments.plan.memory_budget import GIB
from tests.hub_configs import config_file
from tests.serve_app.commands.check.test_plan import ROOT, run


def test_what_does_not_fit_is_told_in_one_line_with_the_numbers_that_would() -> None:
    result = run("--model", str(config_file("gemma-3-12b-it")), "--gpu-memory", "24GiB")
    assert result.exit_code == 1
    [line] = result.stdout.splitlines()
    assert line.startswith("gemma-3-12b-it does not fit: a share of 1 of 24.00 GiB leaves 21.60")
    assert line.endswith("give it a device of 26.9 GiB")


def test_a_table_tells_each_part_and_why() -> None:
    result = run("--model", str(ROOT / "models" / "pydoc-chat"), "--gpu-memory", "24GB")
    assert result.exit_code == 0
    for part in ("weights", "a step", "captured steps", "context and headroom", "keys and values"):
        assert part in result.stdout
    assert "max_model_len auto is 2048: the model's own limit" in result.stdout


def test_of_a_model_of_vllm_the_weights_are_told_and_the_rest_left_to_it(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    quantized = {"model_type": "newest", "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(quantized))
    shard = "model-00001-of-00001.safetensors"
    index = {"weight_map": {"lm_head.weight": shard}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    # Mistral's repositories have all weights once more, in a file that the index does not name.
    for name in (shard, "consolidated.safetensors"):
        with (folder / name).open("wb") as weights:
            weights.truncate(30 * GIB)
    entry = {"id": "big", "source": "m", "engine": "vllm"}
    divided = {**entry, "engine_args": {"tensor_parallel_size": 2}}
    shared = {**entry, "id": "half", "gpu_share": 0.5}
    file = tmp_path / "f.yaml"
    application = {"import_path": "serve_app.app:build", "args": {"models": [divided, shared]}}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    result = run(str(file), "--gpu-memory", "48GiB", "--gpus", "3")
    assert result.exit_code == 1
    first, second = result.stdout.splitlines()
    assert first.startswith("big (vLLM): 30.00 GiB of weights on 2 devices, each of which gives 44")
    assert first.endswith("vLLM measures at its start how much of the rest holds keys and values")
    assert second.startswith("half (vLLM): 30.00 GiB of weights on a device, which gives 22.08 GiB")
    assert "they do not fit" in second
    as_json = run(str(file), "--gpu-memory", "48GiB", "--gpus", "3", "--json")
    assert [each["fits"] for each in json.loads(as_json.stdout)["models"]] == [True, False]


def test_a_plan_tells_what_sleepers_of_a_gpu_keep_of_the_machine_s_memory(tmp_path: Path) -> None:
    def model(id_: str, **keys: object) -> dict[str, object]:
        source = {"source": str(config_file("qwen2.5-7b-instruct")), "dtype": "bfloat16"}
        return {"id": id_, "gpu_share": 0.25, "light_sleep_after_s": 60, **source, **keys}

    models = [
        model("own"),
        model("awake", light_sleep_after_s=None),
        model("on-cpu", device="cpu", num_gpus=0, max_model_len=1024),
    ]
    file = tmp_path / "f.yaml"
    application = {"import_path": "serve_app.app:build", "args": {"models": models}}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    found = json.loads(run(str(file), "--gpu-memory", "80GiB", "--json").stdout)["models"]
    pinned = [each["pinned_bytes"] for each in found]
    assert pinned == [found[0]["weight_bytes"], 0, 0]
    assert pinned[0] > 14 * GIB
    size = f"{pinned[0] / GIB:.2f} GiB"
    told = run(str(file), "--gpu-memory", "80GiB").stdout
    assert f"replicas keep up to {size} of the machine's memory pinned" in told
    assert f"one of each model: own {size}\n" in told


def test_a_plan_counts_twice_the_weights_of_vllm_s_sleepers(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "newest"}))
    with (folder / "model.safetensors").open("wb") as weights:
        weights.truncate(30 * GIB)
    entry = {"id": "big", "source": "m", "engine": "vllm", "light_sleep_after_s": 60}
    file = tmp_path / "f.yaml"
    application = {"import_path": "serve_app.app:build", "args": {"models": [entry]}}
    file.write_text(yaml.safe_dump({"applications": [application]}))
    found = json.loads(run(str(file), "--gpu-memory", "48GiB", "--json").stdout)["models"]
    assert [each["pinned_bytes"] for each in found] == [60 * GIB]
