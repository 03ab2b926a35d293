import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.manifests import ROOT
from tests.k8s.renderings import rendering_of
from tests.k8s.rules.references import MADE_BY_HAND

README = ROOT / "k8s" / "README.md"
MARKS = ("tested", "soak", "not run here")
NEED_MORE = ("docker", "kind", "helm", "gcloud", "eksctl", "curl", "kubectl apply", "kubectl -n")
"""What the commands that can't run here begin with: a cluster, a registry, a container engine."""


def commands() -> list[tuple[str, str]]:
    """Return the commands of README.md and their marks."""
    blocks = re.findall(r"```bash\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    pairs = (line.rpartition("  # [") for line in lines)
    return [(command, mark.removesuffix("]")) for command, _, mark in pairs]


def test_every_command_has_a_mark() -> None:
    assert len(commands()) > 15
    assert {mark for _, mark in commands()} == set(MARKS)
    for command, mark in commands():
        assert (mark == "not run here") == command.startswith(NEED_MORE), command


@pytest.mark.parametrize("cluster", ["kind, without a GPU", "GKE", "EKS"])
def test_a_streamed_answer_takes_six_commands(cluster: str) -> None:
    text = README.read_text(encoding="utf-8")
    first = text.split("## From an empty cluster")[1].split("###")[0]
    then = text.split(f"### {cluster}\n")[1].split("\n#")[0]
    assert len(re.findall(r"  # \[[a-z ]+\]$", first + then, re.MULTILINE)) == 6


def test_it_says_how_each_secret_is_made_that_manifests_leave_out() -> None:
    text = README.read_text(encoding="utf-8")
    assert {name for name in MADE_BY_HAND if name not in text} == set()


@pytest.mark.kubectl
def test_the_weights_can_be_brought_before_anything_else_changes() -> None:
    label = ("app.kubernetes.io/component", "weights")
    chosen = [
        (each["kind"], each["metadata"]["name"])
        for each in rendering_of("gpu-single").manifests
        if label in each["metadata"].get("labels", {}).items()
    ]
    assert sorted(chosen) == [
        ("ConfigMap", "raystream-serve-config"),
        ("Job", "raystream-download"),
        ("PersistentVolumeClaim", "raystream-models"),
    ]


@pytest.mark.kubectl
@pytest.mark.parametrize("command", [command for command, mark in commands() if mark == "tested"])
def test_a_command_that_is_marked_as_tested_runs(command: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout
