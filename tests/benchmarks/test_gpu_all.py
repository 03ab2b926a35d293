import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu import all as program
from benchmarks.gpu import equality, parts
from benchmarks.gpu.parts import PARTS, Machine, Row
from benchmarks.gpu.rates import Load
from benchmarks.gpu.shapes import TINY
from benchmarks.gpu.vllm_rate import vllm_rates

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("frozen_heap")]

CPU = Machine(torch.device("cpu"))
IN_A_CHILD = {"gpu_tests", "kernels", "operators", "vllm"}
"""Parts that say nothing without a GPU."""


@pytest.mark.parametrize("name", sorted(PARTS.keys() - IN_A_CHILD))
def test_each_part_runs_on_a_cpu_with_tiny_shapes(
    monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    if name == "sleep":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # its weights lie there
    monkeypatch.setattr(equality, "NUM_SEQS", 4)
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    rows = list(PARTS[name].rows(CPU))
    assert rows
    assert all(json.dumps(row) for row in rows)
    if name == "equality":
        exact = [row["equal to generate"] for row in rows if row["dtype"] == "float32"]
        assert exact == ["4 of 4"] * 10
    if name == "moved_answers":
        moved = [row["equal to those of one process"] for row in rows]
        assert moved == ["24 of 24"] * 2
    if name == "shares":
        assert [row["is"] for row in rows][1].startswith("0.03 of 0.03 in its share")
    if name == "sleep":
        assert [(row["level"], row["equal answers"]) for row in rows] == [(2, "2 of 2")]
    if name == "turns":
        names = ["Qwen2.5-7B", "Gemma 3 12B's text model"]
        assert [(row["model"], row["turn"]) for row in rows] == [
            (model, number) for number in ("first", 1, 2) for model in names
        ]
        assert {(row["level"], row["equal answers"]) for row in rows} == {(2, "2 of 2")}
        slept = [row["the other slept in, s"] for row in rows]
        assert slept[0] == "-"
        assert all(isinstance(seconds, float) for seconds in slept[1:])
    if name == "images":
        assert rows[0]["prompt"] == "12 tokens and an image of 4"


def test_vllm_is_measured_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Load(2, 8, 4)
    assert list(vllm_rates(TINY, [load])) == [{"vLLM": "is not installed"}]
    fake = FakeVllm()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: fake)
    monkeypatch.setattr(importlib, "import_module", lambda name: fake)
    ready, row = vllm_rates(TINY, [load])
    assert ready["vLLM"].startswith("fake, ready in")
    assert row["sequences"] == 2
    assert fake.asked == [(2, 8, 2), (2, 8, 4), (2, 8, 1)]


class FakeVllm:
    """Stands in for the package: notes how many prompts, of what length, get how many tokens."""

    __version__ = "fake"

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def LLM(self, folder: str, **options: Any) -> "FakeVllm":  # noqa: N802 - vLLM's name
        assert json.loads((Path(folder) / "config.json").read_text())["model_type"] == "qwen2"
        assert options["load_format"] == "dummy"
        return self

    def SamplingParams(self, **options: Any) -> Any:  # noqa: N802 - vLLM's name
        return options

    def generate(self, prompts: list[Any], params: Any, **options: Any) -> None:
        length = len(prompts[0]["prompt_token_ids"])
        self.asked.append((len(prompts), length, params["max_tokens"]))


def test_all_parts_but_the_last_end_within_nine_minutes_and_with_it_within_eleven() -> None:
    assert sum(part.limit_s for part in PARTS.values()) <= 60 * 11
    assert sum(PARTS[name].limit_s for name in list(PARTS)[:-1]) <= 60 * program.MINUTES


def test_a_part_runs_in_a_process_of_its_own_and_its_rows_are_a_line_and_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program.main([str(tmp_path), "--device", "cpu", "--parts", "versions"])
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    outcome = json.loads(line)
    assert (outcome["part"], outcome["trouble"]) == ("versions", None)
    assert f"torch {torch.__version__}" in outcome["rows"][0]["is"]
    table = (tmp_path / "table.md").read_text()
    assert "| what | is |\n| --- | --- |\n| versions | " in table
    assert table.strip() == capsys.readouterr().out.strip()


def test_a_part_without_time_is_named_and_none_is_left_running(tmp_path: Path) -> None:
    program.main([str(tmp_path), "--device", "cpu", "--parts", "versions", "--minutes", "0.001"])
    assert "ended after 0 s" in (tmp_path / "table.md").read_text()
    program.main([str(tmp_path), "--device", "cpu", "--parts", "versions", "--minutes", "0"])
    assert "no time was left" in (tmp_path / "table.md").read_text()


CUT = '{"cut": '


def hang(name: str, device: str, rows_file: Path, log_file: Path) -> None:
    """Stand in for a part that starts a process, writes a row and a half, and never ends."""
    os.setsid()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    rows_file.write_text(f'{{"child": {child.pid}}}\n{CUT}')
    child.wait()


def test_a_part_over_its_time_leaves_no_process_and_only_whole_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_file, join = tmp_path / "hanging.jsonl", BaseProcess.join

    def join_or_hang(process: BaseProcess, limit_s: float | None = None) -> None:
        """Let the part's time be over as soon as it hangs."""
        if limit_s is None:
            join(process)
            return
        end = time.monotonic() + limit_s
        while not (rows_file.exists() and rows_file.read_text().endswith(CUT)):
            assert time.monotonic() < end, "it has written nothing"
            time.sleep(0.01)

    monkeypatch.setattr(program, "_run", hang)
    monkeypatch.setattr(BaseProcess, "join", join_or_hang)
    outcome = program.run_part("hanging", "cpu", tmp_path, 200.0)
    assert outcome.trouble == "ended after 200 s"
    (row,) = outcome.rows
    assert row.keys() == {"child"}
    assert has_ended(row["child"])


def has_ended(process_id: int) -> bool:
    """Wait until a process has ended; a zombie has, whoever reaps it."""
    try:
        process = psutil.Process(process_id)
        end = time.monotonic() + 5
        while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
            time.sleep(0.01)
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_part_that_fails_keeps_the_rows_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(machine: Machine) -> Iterator[Row]:
        yield {"kept": 1}
        raise RuntimeError("out of order")

    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    monkeypatch.setitem(parts.PARTS, "failing", parts.Part(fail, 1.0))
    rows = tmp_path / "rows"
    with pytest.raises(RuntimeError):
        parts.main("failing", "cpu", str(rows))
    assert rows.read_text() == '{"kept": 1}\n'
