"""The command as users run it: a separate process against a mock."""

import asyncio
import inspect
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtest.cli import app
from loadtest.commands.run import overlaid, with_flag_repeated
from loadtest.commands.run import run as run_command
from loadtest.config.run_config import RunConfig
from loadtest.load import inputs
from loadtest.mock.script import Behaviour, Fault, Script
from loadtest.mock.server import MockServer, serving
from tests.loadtest.mocked import until
from tests.offenders import for_each

START_DEADLINE_S = 60
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    code: int
    output: str
    errors: str


async def started(*arguments: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadtest", *arguments, cwd=ROOT, stdout=PIPE, stderr=PIPE
    )


async def ended(process: Process) -> Ended:
    async with asyncio.timeout(START_DEADLINE_S):
        output, errors = await process.communicate()
    assert process.returncode is not None
    return Ended(process.returncode, output.decode(), errors.decode())


async def line_with(process: Process, text: bytes) -> None:
    assert process.stderr is not None
    async with asyncio.timeout(START_DEADLINE_S):
        while text not in (line := await process.stderr.readline()):
            assert line, "the process ended without that line"


async def command(*arguments: str) -> Ended:
    return await ended(await started(*arguments))


@asynccontextmanager
async def mocked(*behaviours: Behaviour) -> AsyncIterator[tuple[MockServer, str]]:
    server = MockServer(Script(*behaviours), keeps_requests=True)
    async with serving(server, "127.0.0.1", 0) as port:
        yield server, f"http://127.0.0.1:{port}/v1/chat/completions"


def summary_of(directory: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((directory / "summary.json").read_text())
    return summary


@pytest.mark.slow
async def test_a_sweep_writes_all_files_and_uses_the_server_s_model(tmp_path: Path) -> None:
    out = tmp_path / "run"
    async with mocked(Behaviour(num_events=4)) as (server, url):
        flags = ["-q", "1,4,8", "-n", "5", "--slo", "ttft:2000", "tpot:100", "--out"]
        run = await command("run", url, *flags, str(out))
    assert run.code == 0, run.errors
    names = {path.name for path in out.iterdir()}
    assert {"summary.json", "requests.jsonl", "summary.csv", "report.html"} <= names
    assert len((out / "requests.jsonl").read_text().splitlines()) == 3 + 13 * 5
    summary = summary_of(out)
    assert summary["status"] == "finished"
    assert summary["configuration"]["slo"] == ["ttft:2000", "tpot:100"]
    assert [level["num_successes"] for level in summary["results"]] == [5, 20, 40]
    assert {body["model"] for body in server.bodies if isinstance(body, dict)} == {"mock"}
    assert str(out / "report.html") in run.output
    again = await command("report", str(out))
    assert again.code == 0
    compared = await command("compare", str(out), str(out))
    assert compared.code == 0
    assert "No regression" in compared.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "flags", "code"),
    [
        (Fault.HTTP_5XX, [], 1),
        (None, ["--fail-if", "ttft.p50>=0"], 99),
        (None, ["--fail-if", "ttft.p50>600000"], 0),
    ],
)
async def test_the_exit_code_gives_the_outcome(
    tmp_path: Path, fault: Fault | None, flags: list[str], code: int
) -> None:
    async with mocked(Behaviour(fault=fault, num_events=2)) as (_, url):
        run = await command(
            "run", url, "-q", "2", "-n", "2", "--out", str(tmp_path / "run"), *flags
        )
    assert run.code == code, run.errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["SIGINT", "SIGTERM"]
)
async def test_a_signal_ends_the_run_and_saves_its_results(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    out = tmp_path / "run"
    silence = Behaviour(fault=Fault.TIMEOUT_STALL, fault_after=2)
    async with mocked(Behaviour(times=2, num_events=2), silence) as (server, url):
        process = await started("run", url, "-q", "2", "--warmup", "0", "--out", str(out))
        await until(lambda: len(server.bodies) == 4)
        process.send_signal(number)
        await line_with(process, b"Stopping: ")
        process.send_signal(number)
        run = await ended(process)
    assert run.code == code, run.errors
    records = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    assert sorted(str(record["error"]) for record in records) == ["None"] * 2 + ["cancelled"] * 2
    assert summary_of(out)["status"] == "stopped"
    assert (out / "report.html").exists()


@pytest.mark.slow
async def test_a_kill_loses_no_request_that_had_ended(tmp_path: Path) -> None:
    out = tmp_path / "run"
    silence = Behaviour(fault=Fault.TIMEOUT_STALL)
    async with mocked(Behaviour(times=3, num_events=2), silence) as (server, url):
        process = await started("run", url, "-q", "1", "--warmup", "0", "--out", str(out))
        await until(lambda: len(server.bodies) == 4)
        process.kill()
        await ended(process)
    assert len((out / "requests.jsonl").read_text().splitlines()) == 3
    assert summary_of(out)["status"] == "running"
    again = await command("report", str(out))
    assert again.code == 0, again.errors
    assert summary_of(out)["status"] == "interrupted"


@pytest.mark.slow
async def test_a_closed_output_pipe_does_not_end_the_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    async with mocked(Behaviour(num_events=2)) as (server, url):
        process = await asyncio.create_subprocess_shell(
            f"{sys.executable} -m loadtest run {url} -q 1 -n 3 --warmup 0 "
            f"--out {out} 2>&1 | exec true; exit ${{PIPESTATUS[0]}}",
            executable="/bin/bash",
            cwd=ROOT,
        )
        async with asyncio.timeout(START_DEADLINE_S):
            code = await process.wait()
        assert len(server.bodies) == 3
    assert code == 0
    assert summary_of(out)["status"] == "finished"


@pytest.mark.slow
async def test_a_full_disk_is_reported_and_earlier_records_can_be_read(tmp_path: Path) -> None:
    out = tmp_path / "run"
    async with mocked(Behaviour(num_events=2)) as (_, url):
        process = await asyncio.create_subprocess_shell(
            f"ulimit -f 8; {sys.executable} -m loadtest run {url} -q 2 -n 100 --out {out}",
            executable="/bin/bash",
            cwd=ROOT,
            stdout=PIPE,
            stderr=PIPE,
        )
        run = await ended(process)
    assert run.code == 1
    assert f"loadtest report {out}" in run.errors
    assert "Traceback" not in run.errors
    again = await command("report", str(out))
    assert again.code == 0, again.errors
    assert summary_of(out)["status"] == "interrupted"
    assert summary_of(out)["results"][0]["num_successes"] > 2


@pytest.mark.slow
async def test_a_directory_that_can_t_be_created_is_reported_before_sending(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with mocked() as (server, url):
        runs = [
            await command("run", url, "--out", str(tmp_path / name)) for name in ("file", "file/x")
        ]
    assert [run.code for run in runs] == [2, 2]
    assert all("can't be written" in run.errors for run in runs)
    assert not server.bodies


@for_each(
    (["run"], "URL is missing"),
    (["run", "nowhere"], "URL: 'nowhere' is not a URL such as"),
    (["run", "http://h/v1/completions", "-q", "many"], "--queues: "),
    (["run", "http://h/v1/completions", "--slo", "speed:1"], "there is no figure 'speed'"),
    (["run", "http://h/v1/completions", "--data", "nowhere.json"], "nowhere.json"),
    (
        ["run", "http://h/v1/completions", "--images", str(ROOT / "loadtest")],
        "holds no files of type",
    ),
    (
        ["run", "http://h/v1/completions", "--images", str(ROOT / "docs")],
        "questions.json: openai-completions accepts no images",
    ),
    (["run", "--config", "nowhere.yml"], "nowhere.yml"),
    (["run", "http://h/v1/completions", "--gpu", "on"], "--gpu on needs nvidia-smi"),
    (["run", "http://h/v1/completions", "--out", str(ROOT), "--speed"], "No such option"),
    (["report", str(ROOT)], "summary.json"),
    (["mock", "--gap-ms", "-1"], "--gap-ms: "),
    (["mock", "--port", "99999"], "less than or equal to 65535"),
)
def test_wrong_usage_is_refused_with_the_mistake(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "has_nvidia_smi", lambda: False)
    run = CliRunner().invoke(app, arguments)
    assert run.exit_code == 2
    assert said in " ".join(run.stderr.replace("│", " ").split())


def test_every_setting_has_its_flag_and_every_flag_its_setting() -> None:
    flags = set(inspect.signature(run_command).parameters) - {"config"}
    assert flags == set(RunConfig.model_fields)


def test_a_flag_removes_settings_of_the_file_that_exclude_it() -> None:
    file = {"duration": 60, "queues": 4, "seed": 1}
    assert overlaid(file, {"loops": "3"}) == {"queues": 4, "seed": 1, "loops": "3"}
    assert overlaid(file, {"rate": "3"}) == {"duration": 60, "seed": 1, "rate": "3"}
    assert overlaid({"rate": 2, "seed": 1}, {"queues": "3", "seed": "2"}) == {
        "queues": "3",
        "seed": "2",
    }


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (["--slo", "ttft:2000", "tpot:100", "-q", "1"], "--slo ttft:2000 --slo tpot:100 -q 1"),
        (["URL", "--slo", "ttft:1", "e2e:2.5"], "URL --slo ttft:1 --slo e2e:2.5"),
        (["--slo", "ttft:1", "--slo", "e2e:2"], "--slo ttft:1 --slo e2e:2"),
        (["--slo", "ttft:1", "http://h:80"], "--slo ttft:1 http://h:80"),
        (["-H", "a:1", "b:2"], "-H a:1 b:2"),
    ],
)
def test_one_slo_flag_takes_several_objectives(written: list[str], read: str) -> None:
    assert " ".join(with_flag_repeated("--slo", written)) == read


@pytest.mark.slow
async def test_a_directory_that_holds_a_run_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("kept\n")
    async with mocked() as (_, url):
        run = await command("run", url, "--out", str(tmp_path))
    assert run.code == 2
    assert "already holds a run" in run.errors
    assert (tmp_path / "requests.jsonl").read_text() == "kept\n"
