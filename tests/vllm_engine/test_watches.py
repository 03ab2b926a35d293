"""A replica, EngineCore and a worker, as three processes that only sleep; and a fake clock."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from deployments.vllm_engine.watches import (
    LOOK_S,
    Activity,
    Looks,
    Watch,
    activity_below,
    end_family,
    end_with_parent,
    watch,
)

REPLICA = """
import multiprocessing, pathlib, sys

if __name__ == "__main__":
    from tests.vllm_engine.test_watches import core

    engine = multiprocessing.get_context("spawn").Process(
        target=core, args=(pathlib.Path(sys.argv[1]), sys.argv[2] == "late")
    )
    engine.start()
    engine.join()
"""
REPLICA_WITH_VLLM = """
import asyncio

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from deployments.vllm_engine.scheduler import bind
from tests.vllm_engine.parameter_sets import PROMPT, tiny_model_folder


async def run(llm):
    params = SamplingParams(max_tokens=240, temperature=0, ignore_eos=True, detokenize=False)
    async for _ in llm.generate(TokensPrompt(prompt_token_ids=list(PROMPT)), params, "a"):
        print("running", flush=True)
    await asyncio.sleep(600)


if __name__ == "__main__":
    arguments = AsyncEngineArgs(
        model=str(tiny_model_folder()),
        dtype="float32",
        max_model_len=256,
        structured_outputs_config={"backend": "guidance"},
        kv_cache_memory_bytes=2**26,
        distributed_executor_backend="uni",
        enforce_eager=True,
    )
    config = arguments.create_engine_config()
    bind(config)
    asyncio.run(run(AsyncLLM.from_vllm_config(config)))
"""
END_S = 5.0


def core(folder: Path, is_late: bool) -> None:
    """Be EngineCore: start a worker, then the watch; if late, only once the replica has ended."""
    replica = os.getppid()
    worker = subprocess.Popen(["sleep", "600"])
    (folder / "pids").write_text(f"{os.getpid()} {worker.pid}\n")
    wait(lambda: not is_late or os.getppid() != replica)
    end_with_parent()
    (folder / "watching").touch()
    worker.wait()
    time.sleep(600)


def wait(condition: Callable[[], bool], deadline_s: float = 60) -> None:
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "what the test waits for has not come"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    # An orphan that has ended stays a zombie where process 1 collects none.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("when", ["watching", "late"])
def test_no_process_is_left_after_the_replica_was_killed(tmp_path: Path, when: str) -> None:
    script = tmp_path / "replica.py"
    script.write_text(REPLICA)
    replica = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), when],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    told = tmp_path / ("watching" if when == "watching" else "pids")
    wait(lambda: told.exists() and (tmp_path / "pids").read_text().endswith("\n"))
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(is_running(pid) for pid in pids)
    replica.send_signal(signal.SIGKILL)
    replica.wait()
    wait(lambda: not any(is_running(pid) for pid in pids), END_S)


@pytest.mark.vllm
def test_vllm_ends_after_its_replica_was_killed_under_a_stream(tmp_path: Path) -> None:
    script = tmp_path / "replica.py"
    script.write_text(REPLICA_WITH_VLLM)
    replica = subprocess.Popen(
        [sys.executable, str(script)],
        # It leaves its model's folder, because it is killed.
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert replica.stdout is not None
    with replica.stdout:
        assert any(line == "running\n" for line in replica.stdout)
        processes = psutil.Process(replica.pid).children(recursive=True)
        assert any("EngineCore" in process.name() for process in processes)
        replica.send_signal(signal.SIGKILL)
    replica.wait()
    wait(lambda: not any(is_running(process.pid) for process in processes), END_S)


def test_a_parent_whose_pid_is_gone_ends_the_process_at_once() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    ended: list[bool] = []
    watch(child.pid, lambda: ended.append(True))
    assert ended == [True]


def test_a_pid_that_another_process_has_got_ends_the_process_at_once() -> None:
    ended: list[bool] = []
    watch(os.getpid(), lambda: ended.append(True))  # alive, but not this process's parent
    assert ended == [True]


def test_an_engine_in_the_replica_itself_is_not_watched() -> None:
    before = psutil.Process().num_threads()
    end_with_parent()
    assert psutil.Process().num_threads() == before


def test_a_process_whose_descendants_can_not_be_read_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def deny() -> None:
        raise psutil.AccessDenied

    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(psutil, "Process", deny)
    monkeypatch.setattr(os, "kill", lambda *call: killed.append(call))
    with pytest.raises(psutil.AccessDenied):
        end_family()
    assert killed == [(os.getpid(), signal.SIGKILL)]


class Engine:
    """An engine's processes, and the clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.activity = Activity(0.0)

    def watch(self, *, on_cpu: bool) -> Watch:
        return Watch(on_cpu=on_cpu, now_s=lambda: self.now_s, read_activity=lambda: self.activity)

    def hangs_after(self, watch: Watch, most_s: int = 100) -> int | None:
        """Return after how many seconds without progress an engine is taken to hang."""
        for second in range(1, most_s + 1):
            self.now_s += 1
            if watch.is_hung():
                return second
        return None


def test_on_a_gpu_the_bound_follows_the_longest_step_but_the_first() -> None:
    engine = Engine()
    watch = engine.watch(on_cpu=False)
    assert engine.hangs_after(watch) == 60  # the first step compiles
    watch.note_progress()
    assert engine.hangs_after(watch) == 8
    watch.note_begin()
    engine.now_s += 1.5
    watch.note_progress()
    assert engine.hangs_after(watch) == 15
    watch.note_begin()
    engine.now_s += 7
    watch.note_progress()
    assert engine.hangs_after(watch) == 60


def test_the_time_without_work_is_no_step() -> None:
    engine = Engine()
    watch = engine.watch(on_cpu=False)
    watch.note_progress()
    engine.now_s += 3600
    watch.note_begin()
    engine.now_s += 0.1
    watch.note_progress()
    assert engine.hangs_after(watch) == 8


def test_on_a_cpu_an_engine_that_neither_computes_nor_waits_for_a_core_hangs() -> None:
    engine = Engine()
    assert engine.hangs_after(engine.watch(on_cpu=True)) == 8


def test_on_a_cpu_an_engine_without_a_core_or_with_a_slow_disk_does_not_hang() -> None:
    engine = Engine()
    engine.activity = Activity(0.0, is_working=True)
    watch = engine.watch(on_cpu=True)
    assert engine.hangs_after(watch) is None
    engine.activity = Activity(0.0)
    assert engine.hangs_after(watch) is not None


def test_on_a_cpu_an_engine_that_computes_does_not_hang() -> None:
    engine = Engine()
    watch = engine.watch(on_cpu=True)
    for _ in range(100):
        engine.now_s += 1
        engine.activity = Activity(engine.activity.cpu_s + 0.5)
        assert not watch.is_hung()


def test_on_a_cpu_any_sign_of_work_in_the_last_seconds_is_one() -> None:
    engine = Engine()
    watch = engine.watch(on_cpu=True)
    for second in range(1, 100):
        engine.now_s += 1
        engine.activity = Activity(0.0, is_working=second % 7 == 0)
        assert not watch.is_hung()
    engine.activity = Activity(0.0)
    assert engine.hangs_after(watch) == 7


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_time_in_which_the_replica_itself_stood_still_is_no_sign(on_cpu: bool) -> None:
    engine = Engine()
    watch = engine.watch(on_cpu=on_cpu)
    watch.note_progress()
    for _ in range(3):
        engine.now_s += 3600  # its machine was paused: what the engine did is not read yet
        assert not watch.is_hung()
    assert engine.hangs_after(watch) == 2


def test_a_standstill_between_two_looks_counts_as_two_of_them() -> None:
    now_s = 1000.0
    looks = Looks(lambda: now_s)
    now_s += 0.5
    assert looks.passed_s() == 0.5
    now_s += 3600
    assert looks.passed_s() == 2 * LOOK_S
    assert looks.passed_s() == 0


def test_an_engine_of_which_a_process_is_stopped_hangs_whatever_the_others_do() -> None:
    engine = Engine()
    engine.activity = Activity(0.0, is_working=True, is_stopped=True)
    assert engine.hangs_after(engine.watch(on_cpu=True)) == 8


@pytest.mark.parametrize("stops", [False, True])
def test_a_process_that_computes_works_until_it_is_stopped(stops: bool) -> None:
    def is_told() -> bool:
        found = activity_below()
        return (found.is_working, found.is_stopped) == (not stops, stops)

    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        try:
            wait(lambda: activity_below().cpu_s > 0)
            if stops:
                process.send_signal(signal.SIGSTOP)
            wait(is_told)
        finally:
            process.kill()


def test_a_process_works_whose_main_thread_waits_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = "import threading as t; t.Thread(target=sum, args=[iter(int, 1)]).start()"
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            computing = psutil.Process(process.pid)
            wait(lambda: computing.cpu_times().user > 0.2)
            wait(lambda: computing.status() == psutil.STATUS_SLEEPING)
            monkeypatch.setattr(psutil.Process, "children", lambda _, recursive: [computing])
            for _ in range(100):
                assert activity_below().is_working
        finally:
            process.kill()


def test_a_process_that_sleeps_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            sleeping = psutil.Process(process.pid)
            wait(lambda: sleeping.status() == psutil.STATUS_SLEEPING)
            # Other tests of this process may have children, too.
            monkeypatch.setattr(psutil.Process, "children", lambda _, recursive: [sleeping])
            assert not activity_below().is_working
        finally:
            process.kill()
