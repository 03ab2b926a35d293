import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pynvml
import pytest
import yaml
from typer.testing import CliRunner, Result

from deployments.plan import cgroup
from deployments.plan.memory_budget import GIB
from deployments.plan.start_times import note_start, note_wake
from serve_app.commands.check import plan as planning
from serve_app.commands.check.plan import (
    SLEEPER_BYTES,
    PlanError,
    card_of,
    models_of,
    parse_size,
    sum_at_once,
)
from serve_app.commands.check.turns import TurnPolicyConfig
from serve_app.commands.cli import app
from serve_app.gpu_shares import to_spec
from tests.failing import failing
from tests.hub_configs import config_file

ROOT = Path(__file__).parents[4]
OPERATING = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def run(*args: str) -> Result:
    return CliRunner().invoke(app, ["plan", *args], env={"COLUMNS": "200"})


def plan(name: str, *args: str) -> Any:
    result = run("--model", str(config_file(name)), "--json", *args)
    return json.loads(result.stdout)["models"][0]


@pytest.mark.slow
def test_a_plan_needs_neither_torch_nor_weights() -> None:
    code = (
        "import sys; from serve_app.commands.cli import app; sys.argv[0] = 'raystream'\n"
        "try: app()\n"
        "finally: print('torch' in sys.modules and sys.modules['torch'] is not None)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "plan", "--model", str(config_file("qwen2.5-7b-instruct")),
         "--gpu-memory", "48GiB", "--share", "0.5"],
        capture_output=True, text=True, timeout=60, cwd=ROOT, check=True,
    )  # fmt: skip
    assert "0.5 = 24.00 GiB" in ended.stdout
    assert ended.stdout.endswith("False\n")
    assert ended.stderr == ""


def test_a_7b_model_on_half_of_a_48_gib_card_and_a_whole_one() -> None:
    half = plan("qwen2.5-7b-instruct", "--gpu-memory", "48GiB", "--share", "0.5")
    whole = plan("qwen2.5-7b-instruct", "--gpu-memory", "48GiB")
    assert half["fits"]
    assert half["kv_token_bytes"] == 2 * 28 * 4 * 128 * 2
    assert half["num_sequences"]["4096"] < whole["num_sequences"]["4096"]
    parts = (
        "weight_bytes",
        "step_bytes",
        "graph_bytes",
        "headroom_bytes",
        "kv_bytes",
        "left_bytes",
    )
    assert sum(half[part] for part in parts) == pytest.approx(half["share_bytes"], abs=2)


def test_a_classifier_on_a_40_gib_card() -> None:
    found = plan("radar-vicuna-7b", "--gpu-memory", "40GiB", "--share", "0.1")
    assert found["fits"]
    assert (found["max_model_len"], found["kv_bytes"]) == (512, 0)


def test_the_operator_s_table_has_the_figures_of_the_plan() -> None:
    rows = re.findall(r"^\| `(\S+)` \| (\d+GiB) \(.+?\) \| (.+) \|$", OPERATING, re.MULTILINE)
    assert len(rows) == 5
    for name, memory, cells in rows:
        found = plan(name, "--gpu-memory", memory)
        told = [cell for each in cells.split("|") if (cell := each.strip())]
        assert told == (figures(found) if found["fits"] else ["does not fit"])


def figures(found: Any) -> list[str]:
    """Return the cells of a plan's row."""
    parts = ("weight_bytes", "step_bytes", "graph_bytes", "kv_bytes")
    memory = [f"{found[part] / GIB:.2f}" if found[part] else "-" for part in parts]
    numbers = [found["num_sequences"][length] for length in ("1024", "4096", "16384")]
    return [*memory, f"{found['max_model_len']:,}", *(str(number or "-") for number in numbers)]


def test_the_refusals_in_the_operator_s_page_are_what_the_commands_print() -> None:
    examples = re.findall(r"^\$ raystream plan (.+)\n(.+)$", OPERATING, re.MULTILINE)
    assert len(examples) == 2
    for options, line in examples:
        result = run(*options.split())
        assert (result.exit_code, result.stdout) == (1, f"{line}\n")


def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pynvml, "nvmlInit", failing(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    )


def without_a_gpu(monkeypatch: pytest.MonkeyPatch, free_gib: int, total_gib: int = 128) -> None:
    no_driver(monkeypatch)
    monkeypatch.setattr(planning, "has_bfloat16", lambda: True)
    monkeypatch.setattr(cgroup, "available_bytes", lambda: free_gib * GIB)
    monkeypatch.setattr(cgroup, "total_bytes", lambda: total_gib * GIB)


def test_a_plan_for_a_cpu_tells_what_the_start_needs_and_what_may_be_taken_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_a_gpu(monkeypatch, 60, 64)
    options = ("--max-num-seqs", "64", "--max-model-len", "32768")
    found = plan("qwen2.5-7b-instruct", *options)
    assert 15.9 * GIB < found["kv_bytes"] <= 16 * GIB
    assert found["start_bytes"] == found["weight_bytes"] + found["step_bytes"]
    assert found["most_bytes"] == found["start_bytes"] + found["kv_bytes"]

    more = ("--kv-cache-memory-bytes", str(20 * GIB))
    larger = plan("qwen2.5-7b-instruct", *options, *more)["kv_bytes"]
    assert 19.9 * GIB < larger <= 20 * GIB
    told = run("--model", str(config_file("qwen2.5-7b-instruct")), *options).stdout
    for name, size in (("needed at start", "start_bytes"), ("reserved at most", "most_bytes")):
        assert re.search(rf"{name}\s+│\s+{found[size] / GIB:.2f} GiB", told)
    assert "kv_cache_memory_bytes auto is 17179869184: a quarter of the machine's" in told


def test_a_folder_of_sentence_transformers_is_planned_without_keys_and_values(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(config_file("qwen2.5-7b-instruct").read_text())
    (tmp_path / "modules.json").write_text("[]")
    result = run("--model", str(tmp_path), "--gpu-memory", "24GB", "--json")
    assert result.exit_code == 0, result.stdout
    (planned,) = json.loads(result.stdout)["models"]
    assert (planned["kv_bytes"], planned["max_num_seqs"]) == (0, 1)
    assert planned["reasons"]["max_model_len"] == "enough for one text"


def a_file(tmp_path: Path, *names: str, **changes: Any) -> str:
    models = [
        {
            "id": name,
            "source": str(config_file(name)),
            "task": "classify" if name.startswith("radar") else "generate",
            **changes,
        }
        for name in names
    ]
    document = {
        "http_options": {"host": "127.0.0.1"},
        "applications": [{"import_path": "serve_app.app:build", "args": {"models": models}}],
    }
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(document))
    return str(file)


@pytest.mark.parametrize("memory", ["24GiB", "48GiB", "80GiB"])
def test_a_file_s_models_are_planned_side_by_side(tmp_path: Path, memory: str) -> None:
    file = a_file(tmp_path, "qwen2.5-7b-instruct", "radar-vicuna-7b")
    result = run(file, "--gpu-memory", memory, "--json")
    assert result.exit_code == 0
    chat, detector = json.loads(result.stdout)["models"]
    assert chat["share"] + detector["share"] <= 1
    assert chat["num_sequences"]["1024"] >= 4


def test_models_on_a_cpu_get_what_the_others_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_gpu(monkeypatch, 120)
    file = a_file(tmp_path, "qwen2.5-7b-instruct", "radar-vicuna-7b")
    models = json.loads(run(file, "--json").stdout)["models"]
    for each, other in (models, models[::-1]):
        assert each["share_bytes"] == 120 * GIB - other["most_bytes"]
    together = sum(each["most_bytes"] for each in models)
    assert f"{together / GIB:.2f} GiB reserved at most, of 120.00 GiB" in run(file).stdout


def test_models_on_a_cpu_that_do_not_start_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_gpu(monkeypatch, 40)
    models = ("qwen2.5-7b-instruct", "gemma-3-12b-it")
    for model in models:
        assert "does not fit" not in run(a_file(tmp_path, model)).stdout
    told = run(a_file(tmp_path, *models))
    assert told.exit_code == 1
    assert "of which others hold" in told.stdout
    assert "Side by side they need" in told.stdout


@pytest.mark.parametrize("memory", ["24GiB", "48GiB", "80GiB"])
@pytest.mark.parametrize("source", ["qwen2.5-7b-instruct", "gemma-3-12b-it"])
def test_the_readme_s_change_of_two_lines_works_or_is_refused_with_numbers(
    tmp_path: Path, memory: str, source: str
) -> None:
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    models = document["applications"][0]["args"]["models"]
    models[0] |= {"id": source, "source": str(config_file(source))}
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(document))
    result = run(str(file), "--gpu-memory", memory, "--json")
    fits = [model["fits"] for model in json.loads(result.stdout)["models"]]
    assert fits == [(source, memory) != ("gemma-3-12b-it", "24GiB"), True, True]
    if not fits[0]:
        told = run(str(file), "--gpu-memory", memory).stdout
        assert "give it a device of 2" in told
        assert "Side by side they need" in told


def test_two_large_models_do_not_fit_on_a_card_that_holds_each(tmp_path: Path) -> None:
    file = a_file(tmp_path, "qwen2.5-7b-instruct", "gemma-3-12b-it")
    told = run(file, "--gpu-memory", "40GiB")
    assert told.exit_code == 1
    assert "Side by side they need 4" in told.stdout
    assert run(file, "--gpu-memory", "40GiB", "--gpus", "2").exit_code == 0


def test_the_gpus_of_this_machine_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [48 * GIB, 24 * GIB]
    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(sizes))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    monkeypatch.setattr(
        pynvml, "nvmlDeviceGetMemoryInfo", lambda index: SimpleNamespace(total=sizes[index])
    )
    found = card_of(None)
    assert (found.memory.total_bytes, found.num) == (24 * GIB, 2)


def test_the_shipped_file_is_planned_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_driver(monkeypatch)
    result = run(str(ROOT / "serve_config.yaml"))
    assert result.exit_code == 0
    assert "this machine's CPU" in result.stdout


def test_of_models_that_take_turns_only_the_largest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    no_driver(monkeypatch)
    shipped = (ROOT / "serve_config.yaml").read_text()
    document = yaml.safe_load(shipped)
    application = document["applications"][0]
    names = ["pydoc-chat", "pydoc-detector"]
    for section in application["deployments"][1:]:
        section["autoscaling_config"]["min_replicas"] = 0
    application["autoscaling_policy"] = {
        "policy_function": "deployments.turns:TurnPolicy",
        "policy_kwargs": {"groups": {"cpu": names}, "min_turn_s": 7},
    }
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(document))
    told = run(str(file))
    assert told.exit_code == 0, told.stderr
    line = "pydoc-chat, pydoc-detector take turns (cpu): one of them runs at a time, for at least 7"
    assert line in told.stdout
    assert "the next one, which was not measured on this machine yet" in told.stdout
    chat = next(each for each in models_of(file) if each.id == names[0])
    note_start(to_spec(chat, 0.0), 7.25)
    sleeps = "sleeps lightly after 300 s without use, and ends its process 900 s later"
    assert f"pydoc-chat {sleeps}" in told.stdout
    last = "the last starts on this machine: pydoc-chat 7.2 s, pydoc-detector not measured yet"
    assert last in run(str(file)).stdout
    plan = json.loads(run(str(file), "--json").stdout)
    assert plan["turns"] == {"cpu": names}
    deep = {each["id"]: (each["light_after_s"], each["deep_after_s"]) for each in plan["models"]}
    assert deep == dict.fromkeys([*names, "pydoc-search"], (300, 900))
    starts = {each["id"]: each["last_start_s"] for each in plan["models"]}
    assert starts == {"pydoc-chat": 7.25, "pydoc-detector": None, "pydoc-search": None}
    size = {each["id"]: each["start_bytes"] for each in plan["models"]}
    together = max(size[id_] for id_ in names) + size["pydoc-search"]
    assert f"Together on the CPU: {together / GIB:.2f} GiB needed at start" in told.stdout


def test_models_that_sleep_lightly_between_their_turns_are_counted_as_sleepers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    no_driver(monkeypatch)
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    application = document["applications"][0]
    ingress, section = application["deployments"][:2]
    section["autoscaling_config"] |= {"min_replicas": 0, "max_replicas": 1}
    names = ["a", "b", "c"]
    entry = application["args"]["models"][0]
    entry |= {"source": str(ROOT / entry["source"]), "light_sleep_after_s": 60}
    application["args"]["models"] = [entry | {"id": name} for name in names]
    application["deployments"] = [ingress, *(section | {"name": name} for name in names)]
    kwargs: dict[str, Any] = {"groups": {"cpu": names}}
    policy = {"policy_function": "deployments.turns:TurnPolicy", "policy_kwargs": kwargs}
    application["autoscaling_policy"] = policy
    file = tmp_path / "serve_config.yaml"
    told = {}
    for light in ([], ["cpu"]):
        kwargs["light"] = light
        file.write_text(yaml.safe_dump(document))
        told[bool(light)] = run(str(file))
        assert told[bool(light)].exit_code == 0, told[bool(light)].stderr
    plan = json.loads(run(str(file), "--json").stdout)
    assert (plan["turns"], plan["light"]) == ({"cpu": names}, ["cpu"])
    largest = max(each["start_bytes"] for each in plan["models"])
    for is_light, size in ((False, largest), (True, largest + 2 * SLEEPER_BYTES)):
        line = f"Together on the CPU: {size / GIB:.2f} GiB needed at start"
        assert line in told[is_light].stdout
    assert "A swap starts the next one" in told[False].stdout
    assert "The others sleep lightly meanwhile" in told[True].stdout
    assert "A swap starts the next one" not in told[True].stdout
    assert "the last wakes on this machine: a not measured yet, b" in told[True].stdout
    note_wake(to_spec(models_of(file)[0], 0.0), 0.44)
    # All three are the same model.
    assert "the last wakes on this machine: a 0.4 s, b 0.4 s, c 0.4 s" in run(str(file)).stdout
    plan = json.loads(run(str(file), "--json").stdout)
    assert {(each["last_wake_s"], each["last_start_s"]) for each in plan["models"]} == {
        (0.44, None)
    }


def test_a_model_has_its_turn_beside_the_sleepers_of_its_group() -> None:
    groups: dict[str, Any] = {"one": ("a", "b", "c"), "two": ("d", "e")}
    turns = TurnPolicyConfig(groups=groups, light=("one",))
    sizes = {"a": 5, "b": 7, "c": 6, "d": 3, "e": 2, "f": 1}
    assert sum_at_once(sizes, turns) == 7 + 2 * SLEEPER_BYTES + 3 + 1
    others = {"d": 3, "e": 2, "f": 1}
    assert sum_at_once(others, turns, beside="a") == 2 * SLEEPER_BYTES + 3 + 1
    assert sum_at_once({"f": 1}, turns, beside="d") == 1, "no model of the other group runs here"
    assert sum_at_once(sizes, None) == 24


def test_models_that_take_light_turns_on_a_gpu_are_told_with_the_weights_that_memory_keeps(
    tmp_path: Path,
) -> None:
    names = ["qwen2.5-7b-instruct", "gemma-3-12b-it"]
    file = Path(a_file(tmp_path, *names, num_gpus=1, light_sleep_after_s=60))
    document = yaml.safe_load(file.read_text())
    kwargs = {"groups": {"card": names}, "light": ["card"]}
    policy = {"policy_function": "deployments.turns:TurnPolicy", "policy_kwargs": kwargs}
    document["applications"][0]["autoscaling_policy"] = policy
    file.write_text(yaml.safe_dump(document))
    told = run(str(file), "--gpu-memory", "80GiB").stdout
    assert "from the machine's memory, which keeps 36.9 GiB of weights for all of them" in told
    document["applications"][0]["args"]["models"][0]["num_gpus"] = 0.5
    file.write_text(yaml.safe_dump(document))
    refused = run(str(file), "--gpu-memory", "80GiB").output
    assert "use the same part of one GPU" in refused
    assert "The others sleep lightly" not in refused


def test_models_that_have_turns_at_the_same_time_are_counted_together() -> None:
    turns = TurnPolicyConfig(groups={"one": {"a": 0.5, "b": 0.5, "c": 0.2, "d": 0.9}})
    sizes = {"a": 5, "b": 6, "c": 2, "d": 10, "f": 1}
    assert sum_at_once(sizes, turns) == 5 + 6 + 1
    others = {id_: size for id_, size in sizes.items() if id_ != "c"}
    assert sum_at_once(others, turns, beside="c") == 6 + 1, "c does not fit beside a and b"
    others = {id_: size for id_, size in sizes.items() if id_ != "d"}
    assert sum_at_once(others, turns, beside="d") == 1


def test_models_that_fit_together_by_the_file_and_not_by_their_shares_are_named(
    tmp_path: Path,
) -> None:
    document = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    application = document["applications"][0]
    names = ["a", "b", "c"]
    entry = application["args"]["models"][0]
    entry |= {"source": str(ROOT / entry["source"])}
    application["args"]["models"] = [
        entry | {"id": name, "num_gpus": share}
        for name, share in zip(names, (0.5, 0.6, 0.9), strict=True)
    ]
    ingress, section = application["deployments"][:2]
    section["autoscaling_config"] |= {"min_replicas": 0}
    application["deployments"] = [ingress, *(section | {"name": name} for name in names)]
    kwargs = {"groups": {"card": {"a": 0.5, "b": 0.5, "c": 0.9}}}
    policy = {"policy_function": "deployments.turns:TurnPolicy", "policy_kwargs": kwargs}
    application["autoscaling_policy"] = policy
    file = tmp_path / "serve_config.yaml"
    file.write_text(yaml.safe_dump(document))
    told = run(str(file), "--gpu-memory", "24GiB").stdout
    assert "a, b, c take turns (card): a with b, or c runs at a time, for at least three" in told
    wrong = "a and b have turns at the same time, but reserve 1.1 of 1 GPUs: raise their parts"
    assert wrong in told
    assert wrong not in run(str(file), "--gpu-memory", "24GiB", "--gpus", "2").stdout
    plan = json.loads(run(str(file), "--gpu-memory", "24GiB", "--json").stdout)
    assert plan["together"] == {"card": [["a", "b"], ["c"]]}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--model", "models/none"), "there is no folder 'models/none', and the repository"),
        (("--model", "models/pydoc-chat", "--gpu-memory", "48"), "'48' is no size: write a number"),
        (("--model", "models/pydoc-chat", "--gpu-memory", "0GiB"), "'0GiB' holds nothing"),
        (("none.yaml",), "none.yaml: No such file"),
        (("pyproject.toml",), "pyproject.toml:2: it does not continue what stands above"),
    ],
)
def test_wrong_input_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)  # as without a network
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("method", ["awq", "fp8"])
def test_a_model_that_no_replica_loads_is_refused_and_not_planned(
    tmp_path: Path, method: str
) -> None:
    config = json.loads(config_file("qwen2.5-7b-instruct").read_text())
    config["quantization_config"] = {"quant_method": method}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run("--model", str(tmp_path), "--gpu-memory", "48GiB")
    assert result.exit_code == 2
    assert f"is quantized ({method}), and only unquantized weights are served" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_relative_source_starts_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    file = tmp_path / "serve_config.yaml"
    shipped = (ROOT / "serve_config.yaml").read_text()
    file.write_text(shipped.replace("models/pydoc-chat", "my-model"))
    assert models_of(file)[0].source == str(tmp_path / "my-model")
    assert models_of(file)[1].source == "models/pydoc-detector"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{"model_type": "bert", "id2label": ["a"]}', "AttributeError: 'list' object has no a"),
        ("version https://git-lfs.github.com/spec/v1", "config.json; run `git lfs pull` there"),
    ],
)
def test_a_configuration_that_transformers_can_t_read_is_told_in_one_line(
    tmp_path: Path, written: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(written)
    result = run("--model", str(tmp_path))
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_with_faults_is_planned_for_another_machine_and_never_called_right(
    tmp_path: Path,
) -> None:
    file = a_file(tmp_path, "qwen2.5-7b-instruct", num_cpus=1000, gpu_share=2)
    wrong = run(file, "--gpu-memory", "48GiB")
    assert (wrong.exit_code, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert "gpu_share: " in wrong.stderr
    file = a_file(tmp_path, "qwen2.5-7b-instruct", num_cpus=1000)
    assert run(file, "--gpu-memory", "48GiB").exit_code == 0
    here = run(file)
    assert here.exit_code == 1
    assert "qwen2.5-7b-instruct" in here.stdout  # planned, whether it fits here or not
    assert "a replica asks for 1000 cores, and this machine has " in here.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "either a FILE or --model"),
        (("serve_config.yaml", "--max-num-seqs", "3"), "a FILE has its models' sizes"),
        (("serve_config.yaml", "--gpus", "2"), "--gpus needs --gpu-memory"),
    ],
)
def test_options_that_would_have_no_effect_are_refused(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("text", "size"), [("48GiB", 48 * 2**30), ("1.5 GB", 1_500_000_000), ("512MiB", 2**29)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_a_size_needs_a_unit() -> None:
    with pytest.raises(PlanError):
        parse_size("48")
