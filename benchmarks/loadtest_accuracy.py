"""Checks the accuracy of the load tester's figures, and measures what they cost.

Accuracy: measures a mock of known timing; each figure must be within 2 ms + 1 % of the truth.
Streams: runs 500 streams at once; the tool's event loop must be less than 5 ms late at p99.
CPU: measures the tool's CPU time per event, compared with `vllm bench serve` on the same mock if a
Python with vLLM is named. Startup time counts for neither tool; computing the results counts only
for vLLM.

The mock is a separate process on the same cores, so other load on the machine shows in every
figure.

Run: python -m benchmarks.loadtest_accuracy [--vllm PYTHON --tokenizer DIR] [--parts accuracy,...]
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

FIRST_MS, GAP_MS, TAIL_MS, NUM_EVENTS = 200.0, 20.0, 30.0, 50
ALLOWED_MS, ALLOWED_SHARE = 2.0, 0.01
NUM_STREAMS = 500
MAX_LAG_MS = 5.0
NUM_REQUESTS, NUM_AT_ONCE, EVENTS_PER_ANSWER = 256, 32, 200
VLLM_BENCH_SERVE = """
import argparse, time
from vllm.benchmarks import serve

benchmark = serve.benchmark

async def timed(*args, **kwargs):
    started_s = time.process_time()
    try:
        return await benchmark(*args, **kwargs)
    finally:
        print("CPU_S", time.process_time() - started_s)

serve.benchmark = timed
parser = argparse.ArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args())
"""
"""Runs `vllm bench serve` and prints the CPU time of the benchmark itself.

vLLM's wheel for CPUs can't start it by its name.
"""
PARTS = ("accuracy", "streams", "cpu")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure whose true value is known.

    Attributes:
        title: The figure's title.
        key: The figure's name in `summary.json`.
        per_unit: The factor from that figure's unit to ms.
        true_ms: The true value, set by the mock's timing.
    """

    title: str
    key: str
    per_unit: float
    true_ms: float


LAST_MS = FIRST_MS + (NUM_EVENTS - 1) * GAP_MS
FIGURES = (
    Figure("TTFT", "ttft_ms", 1.0, FIRST_MS),
    Figure("chunk gap", "chunk_gap_ms", 1.0, GAP_MS),
    Figure("TPOT", "tpot_ms", 1.0, GAP_MS),
    Figure("E2E", "e2e_s", 1000.0, LAST_MS),
    Figure("tail", "tail_ms", 1.0, TAIL_MS),
)


@contextmanager
def mocked(*flags: str) -> Iterator[str]:
    """Run the mock in a separate process until the block ends; yield its URL."""
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "loadtest", "mock", "--port", "0", *flags],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield next(word for word in process.stdout.readline().split() if "://" in word)
    finally:
        process.terminate()
        process.wait()


def measured(url: str, *flags: str) -> dict[str, Any]:
    """Run the load tester; return its summary.

    Raises:
        subprocess.CalledProcessError: The load tester or a request failed.
    """
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "loadtest", "run", url, "--out", f"{folder}/run", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(Path(folder, "run", "summary.json").read_text())
    return summary


def show_accuracy(console: Console) -> bool:
    """Print measured and true figures; return whether all are accurate enough."""
    timing = ("--first-token-ms", str(FIRST_MS), "--gap-ms", str(GAP_MS), "--tail-ms", str(TAIL_MS))
    with mocked(*timing, "--events", str(NUM_EVENTS)) as url:
        # Without a ramp, all users would start at once and measure how the mock handles a burst.
        summary = measured(url, "-q", "1,8,32", "-n", "4", "--ramp", "1.1s")
    table = Table("users", "figure", "true, ms", "p50, ms", "p95, ms", "p50 error", "allowed")
    is_right = True
    for level in summary["results"]:
        for figure in FIGURES:
            found = level["window"]["distributions"][figure.key]
            p50_ms, p95_ms = (found[name] * figure.per_unit for name in ("p50", "p95"))
            allowed_ms = ALLOWED_MS + ALLOWED_SHARE * figure.true_ms
            off_ms = p50_ms - figure.true_ms
            is_right &= abs(off_ms) <= allowed_ms
            cells = (figure.true_ms, p50_ms, p95_ms, off_ms, allowed_ms)
            table.add_row(
                str(level["num_queues"]), figure.title, *(f"{cell:.2f}" for cell in cells)
            )
    console.print(table)
    console.print("all within 2 ms + 1 %" if is_right else "NOT all within 2 ms + 1 %")
    return is_right


def show_streams(console: Console) -> bool:
    """Print the tool's lag under many streams; return whether it is low enough."""
    flags = ("--first-token-ms", "500", "--gap-ms", "100", "--events", "60")
    with mocked(*flags) as url:
        summary = measured(url, "-q", str(NUM_STREAMS), "-n", "3", "--ramp", "2s")
    [level] = summary["results"]
    lag = level["lag_ms"]
    console.print(
        f"{NUM_STREAMS} streams at once: lag of the tool p50 {lag['p50']:.2f} ms, "
        f"p99 {lag['p99']:.2f} ms, max {lag['max']:.2f} ms (n={lag['n']}); "
        f"{level['window']['output_tokens_per_s']:.0f} events/s at "
        f"{level['cpu_share']:.0%} of a core; {level['num_errors']} errors"
    )
    return bool(lag["p99"] < MAX_LAG_MS and not level["num_errors"])


def output_of(command: Sequence[str]) -> str:
    """Run a command to its end and return what it printed.

    Raises:
        subprocess.CalledProcessError: The command failed; the end of its output is printed first.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout[-2000:])
    done.check_returncode()
    return done.stdout


def our_cpu_s(url: str) -> float:
    """Return our tool's CPU time for the load, including its live figures."""
    flags = ("-q", str(NUM_AT_ONCE), "--requests", str(NUM_REQUESTS), "--warmup", "0")
    [level] = measured(url, *flags)["levels"]
    return float(level["cpu_share"] * (level["ended_s"] - level["started_s"]))


def vllm_cpu_s(url: str, python: str, tokenizer: str) -> float:
    """Return the CPU time of vLLM's tool for the same load."""
    base_url, _, _ = url.partition("/v1/")
    printed = output_of(
        [
            *(python, "-c", VLLM_BENCH_SERVE),
            *("--backend", "openai-chat", "--base-url", base_url),
            *("--endpoint", "/v1/chat/completions", "--model", tokenizer),
            *("--tokenizer", tokenizer, "--dataset-name", "random", "--random-input-len", "16"),
            *("--random-output-len", str(EVENTS_PER_ANSWER), "--disable-tqdm"),
            *("--num-prompts", str(NUM_REQUESTS), "--max-concurrency", str(NUM_AT_ONCE)),
        ]
    )
    [line] = [line for line in printed.splitlines() if line.startswith("CPU_S ")]
    return float(line.split()[1])


def show_cpu(console: Console, vllm: str | None, tokenizer: str) -> None:
    """Print each tool's CPU time per event."""
    flags = ("--first-token-ms", "20", "--gap-ms", "10", "--events", str(EVENTS_PER_ANSWER))
    with mocked(*flags) as url:
        cpu_s = {"loadtest": our_cpu_s(url)}
        if vllm is not None:
            cpu_s["vllm bench serve"] = vllm_cpu_s(url, vllm, tokenizer)
    table = Table("tool", "CPU per event, us", "relative to loadtest")
    for name, seconds in cpu_s.items():
        cost_us = seconds / (NUM_REQUESTS * EVENTS_PER_ANSWER) * 1e6
        table.add_row(name, f"{cost_us:.1f}", f"{seconds / cpu_s['loadtest']:.2f}")
    console.print(table)


def main() -> None:
    """Run the chosen parts; exit with 1 if a figure is not good enough."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--vllm", help="a Python interpreter that has vLLM")
    parser.add_argument("--tokenizer", default="gpt2", help="folder of vLLM's tokenizer")
    arguments = parser.parse_args()
    console, is_good = Console(width=110), True
    for part in arguments.parts.split(","):
        match part:
            case "accuracy":
                is_good &= show_accuracy(console)
            case "streams":
                is_good &= show_streams(console)
            case "cpu":
                show_cpu(console, arguments.vllm, arguments.tokenizer)
            case _:
                parser.error(f"unknown part {part!r}; there are {', '.join(PARTS)}")
    sys.exit(not is_good)


if __name__ == "__main__":
    main()
