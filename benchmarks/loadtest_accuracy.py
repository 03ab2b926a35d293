"""Whether the load tester's own figures are right, and what it takes to get them.

Accuracy: a mock of known timing is measured; each figure must be within 2 ms + 1 % of the truth.
Streams: 500 of them at once; the tool's event loop must be less than 5 ms late at p99.
CPU: what an event costs the tool, beside `vllm bench serve` against the same mock, where a Python
that has vLLM is named. Costs are differences between a long and a short run, so that neither start
counts.

The mock is a process of its own on the same cores, so a busy machine shows in every figure.

Run: python -m benchmarks.loadtest_accuracy [--vllm PYTHON --tokenizer DIR] [--parts accuracy,...]
"""

import argparse
import json
import resource
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
NUM_SHORT, NUM_LONG, NUM_AT_ONCE, EVENTS_PER_ANSWER = 16, 96, 16, 200
VLLM_BENCH_SERVE = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; "
    "parser = argparse.ArgumentParser(); add_cli_args(parser); main(parser.parse_args())"
)
"""`vllm bench serve` itself, which vLLM's wheel for CPUs can't start by its name."""
PARTS = ("accuracy", "streams", "cpu")


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of known truth, in ms.

    Attributes:
        title: What it is called.
        key: Its name in `summary.json`.
        per_unit: What turns that into ms.
        true_ms: What the mock does.
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
    """Run the mock in a process of its own until the block ends; give its URL."""
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
        subprocess.CalledProcessError: It failed, or a request did.
    """
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "loadtest", "run", url, "--out", f"{folder}/run", *flags]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        summary: dict[str, Any] = json.loads(Path(folder, "run", "summary.json").read_text())
    return summary


def show_accuracy(console: Console) -> bool:
    """Print measured and true figures; say whether all are near enough."""
    timing = ("--first-token-ms", str(FIRST_MS), "--gap-ms", str(GAP_MS), "--tail-ms", str(TAIL_MS))
    with mocked(*timing, "--events", str(NUM_EVENTS)) as url:
        summary = measured(url, "-q", "1,8,32", "-n", "4")
    table = Table("users", "figure", "true, ms", "p50, ms", "p95, ms", "p50 is off by", "may be")
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
    """Print how late the tool is under many streams; say whether that is little enough."""
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


def cpu_s_of(command: Sequence[str]) -> float:
    """Run a command to its end; return the CPU time it took, all its processes together.

    Raises:
        subprocess.CalledProcessError: It failed; its output is printed first.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.stderr.write(done.stdout[-2000:])
    done.check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def our_command(url: str, num_requests: int, folder: str) -> list[str]:
    """Return what sends so many requests with our tool."""
    return [
        *(sys.executable, "-m", "loadtest", "run", url, "--out", f"{folder}/{num_requests}"),
        *("-q", str(NUM_AT_ONCE), "--requests", str(num_requests), "--warmup", "0"),
    ]


def vllm_command(url: str, num_requests: int, python: str, tokenizer: str) -> list[str]:
    """Return what sends so many requests with vLLM's tool."""
    base_url, _, _ = url.partition("/v1/")
    return [
        *(python, "-c", VLLM_BENCH_SERVE),
        *("--backend", "openai-chat", "--base-url", base_url),
        *("--endpoint", "/v1/chat/completions", "--model", tokenizer, "--tokenizer", tokenizer),
        *("--dataset-name", "random", "--random-input-len", "16"),
        *("--random-output-len", str(EVENTS_PER_ANSWER), "--disable-tqdm"),
        *("--num-prompts", str(num_requests), "--max-concurrency", str(NUM_AT_ONCE)),
    ]


def show_cpu(console: Console, vllm: str | None, tokenizer: str) -> None:
    """Print what an event costs each tool."""
    num_events = (NUM_LONG - NUM_SHORT) * EVENTS_PER_ANSWER
    costs_us: dict[str, float] = {}
    flags = ("--first-token-ms", "20", "--gap-ms", "5", "--events", str(EVENTS_PER_ANSWER))
    with mocked(*flags) as url, TemporaryDirectory() as folder:
        ours = [cpu_s_of(our_command(url, num, folder)) for num in (NUM_SHORT, NUM_LONG)]
        costs_us["loadtest, report included"] = (ours[1] - ours[0]) / num_events * 1e6
        summary = json.loads(Path(folder, str(NUM_LONG), "summary.json").read_text())
        costs_us["loadtest, sending alone"] = _sending_us(summary)
        if vllm is not None:
            theirs = [
                cpu_s_of(vllm_command(url, num, vllm, tokenizer)) for num in (NUM_SHORT, NUM_LONG)
            ]
            costs_us["vllm bench serve"] = (theirs[1] - theirs[0]) / num_events * 1e6
    table = Table("tool", "CPU per event, us", "beside loadtest's sending")
    for name, cost_us in costs_us.items():
        ratio = cost_us / costs_us["loadtest, sending alone"]
        table.add_row(name, f"{cost_us:.1f}", f"{ratio:.2f}")
    console.print(table)


def _sending_us(summary: dict[str, Any]) -> float:
    [level] = summary["levels"]
    cpu_s = level["cpu_share"] * (level["ended_s"] - level["started_s"])
    return float(cpu_s / (NUM_LONG * EVENTS_PER_ANSWER) * 1e6)


def main() -> None:
    """Show what was asked for; exit with 1 if a figure is not good enough."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--tokenizer", default="gpt2", help="for vLLM's prompts: a folder")
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
