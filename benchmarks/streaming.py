"""Compares streams of this checkout with an older commit's: gaps, tokens a second, time to first.

Both serve a random model of 3 million parameters as `make serve` does, each with its own code and
its own Ray. The older code is taken from git into a temporary folder. A closed loop of 1 to 256
streams asks for answers of 64 tokens to prompts of about 64, no two of which begin alike. Rounds
alternate, and medians of the rounds are compared, since machines are noisy.

A gap is the time from one message with text to the next of the same answer, as its reader sees
them: messages that arrive in one read count as one. TTFT is the time from sending a request to the
first message with text. CPU time is that of all the server's processes. The client runs in this
process and shares the machine's cores with ingress, engine and HAProxy, so it only notes when bytes
arrive and reads them after the round.

An older commit than `BASELINE` runs only in an environment that has what it imports.

Run: python -m benchmarks.streaming [--streams 64,256]
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import uvloop
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from benchmarks.cpu_shapes import save_three_million
from benchmarks.free_port import free_ports
from benchmarks.serving.old_checkout import BASELINE, ROOT, old_checkout
from benchmarks.serving.processes import started
from benchmarks.serving.stream_client import Answer, closed_loop
from serve_app.commands.server_environment import HAPROXY_PORTS

CODE = ("serve_app", "deployments", "benchmarks", "k8s", "serve_config.yaml", "serve.env")
MODEL = "three-million"
PROMPT_WORDS, NUM_TOKENS = 50, 64
NUM_REQUESTS = {1: 32, 8: 128, 16: 192, 32: 256, 64: 384, 256: 768}
"""In one round, by the number of streams."""

GOALS_MS = {64: 20.0, 256: 60.0}
"""The largest median gap, by the number of streams."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server under measurement."""

    name: str
    port: int
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class Round:
    """The figures of one round; times in ms."""

    gap_p50: float
    gap_p95: float
    ttft_p50: float
    tokens_per_s: float
    cpu_us_per_token: float


FIGURES: dict[str, Callable[[Round], float]] = {
    "gap p50 ms": lambda each: each.gap_p50,
    "gap p95 ms": lambda each: each.gap_p95,
    "TTFT p50 ms": lambda each: each.ttft_p50,
    "tokens/s": lambda each: each.tokens_per_s,
    "CPU us/token": lambda each: each.cpu_us_per_token,
}


class Prompts:
    """Requests whose prompts differ from their first word on, so that no prefix is shared."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        texts = (str(tokenizer.decode([token_id])) for token_id in range(len(tokenizer)))
        self._words = [text for text in texts if text[:1] == " " and text[1:].isalpha()]
        self._random = random.Random(0)

    def requests(self, num_requests: int) -> list[bytes]:
        """Return new requests."""
        return [self._request() for _ in range(num_requests)]

    def _request(self) -> bytes:
        prompt = "".join(self._random.choices(self._words, k=PROMPT_WORDS)).strip()
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": NUM_TOKENS,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        ).encode()
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body


@contextmanager
def serving(name: str, checkout: Path, model: Path, max_num_seqs: int) -> Iterator[Server]:
    """Serve the model with a checkout's code until the block ends.

    Args:
        name: The server's name in tables and of its log.
        checkout: The folder with the code.
        model: The folder with the model.
        max_num_seqs: The most sequences that run at once.
    """
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment |= dict(zip(HAPROXY_PORTS, map(str, others), strict=True))
    command = [sys.executable, "-m", "benchmarks.peers.serve_model", "--port", str(port)]
    command += ["--model", str(model), "--max-num-seqs", str(max_num_seqs)]
    command += ["--max-model-len", "1024"]
    log = model.with_name(f"{name}.log")
    url = f"http://127.0.0.1:{port}/ready"
    with started(command, url, log=log, cwd=checkout, environment=environment) as process:
        yield Server(name, port, process)


def measure(server: Server, requests: Sequence[bytes], num_streams: int) -> Round:
    """Send the requests in a closed loop and return the figures."""
    began_cpu_s = cpu_s(server.process)
    sent_s = time.perf_counter()
    answers = uvloop.run(closed_loop(server.port, requests, num_streams))
    return figures(answers, sent_s, cpu_s(server.process) - began_cpu_s)


def figures(answers: Sequence[Answer], sent_s: float, used_cpu_s: float) -> Round:
    """Return a round's figures.

    Args:
        answers: All answers of the round.
        sent_s: When the first request was sent.
        used_cpu_s: The CPU seconds of the server's processes meanwhile.
    """
    gaps, ttfts, num_tokens, last_s = [], [], 0, sent_s
    for answer in answers:
        times, num_answered = _text_times(answer)
        gaps += [1e3 * (end - begin) for begin, end in pairwise(times)]
        ttfts.append(1e3 * (times[0] - answer.sent_s))
        num_tokens += num_answered
        last_s = max(last_s, times[-1])
    cuts = statistics.quantiles(gaps, n=20)
    return Round(
        cuts[9],
        cuts[18],
        statistics.median(ttfts),
        num_tokens / (last_s - sent_s),
        1e6 * used_cpu_s / num_tokens,
    )


def _text_times(answer: Answer) -> tuple[list[float], int]:
    """Return when each message with text arrived, and the answer's number of tokens."""
    times: list[float] = []
    num_tokens = 0
    for time_s, message in answer.messages():
        match message:
            case {"choices": [{"delta": {"content": str(text)}}, *_]} if text:
                if time_s not in times[-1:]:
                    times.append(time_s)
            case {"usage": {"completion_tokens": int(count)}}:
                num_tokens = count
    return times, num_tokens


def cpu_s(root: psutil.Process) -> float:
    """Return the CPU seconds that a process and its children have taken."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # Ray stops surplus workers
            times = process.cpu_times()
            total += times.user + times.system
    return total


def compare(
    servers: tuple[Server, Server], prompts: Prompts, streams: Sequence[int], num_rounds: int
) -> Table:
    """Measure by turns, and return a table of the medians and of the rounds' median ratios."""
    table = Table(title=f"Answers of {NUM_TOKENS} tokens")
    for column in ("streams", "figure", *(server.name for server in servers), "ratio"):
        table.add_column(column, justify="right")
    for num_streams in streams:
        pairs = []
        for turn in range(num_rounds + 1):  # the first warms both up
            order = servers if turn % 2 else servers[::-1]
            num_requests = NUM_REQUESTS.get(num_streams, 4 * num_streams)
            rounds = {
                server: measure(server, prompts.requests(num_requests), num_streams)
                for server in order
            }
            pairs.append([rounds[server] for server in servers])
        _add_rows(table, num_streams, pairs[1:])
    return table


def _add_rows(table: Table, num_streams: int, pairs: list[list[Round]]) -> None:
    for figure, value in FIGURES.items():
        old, new = (statistics.median(value(pair[at]) for pair in pairs) for at in (0, 1))
        ratio = statistics.median(value(pair[1]) / value(pair[0]) for pair in pairs)
        cells = (f"{old:.1f}", f"{new:.1f}", f"{ratio:.2f}")
        table.add_row(str(num_streams), figure, *cells, end_section=figure == [*FIGURES][-1])


def main() -> None:
    """Compare, and print the figures and the goals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--baseline", default=BASELINE, help="the older commit")
    parser.add_argument("--streams", default="1,8,16,32,64,256")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    streams = [int(each) for each in options.streams.split(",")]
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        model = Path(folder) / MODEL
        prompts = Prompts(save_three_million(model))
        old = stack.enter_context(old_checkout(options.baseline, *CODE))
        servers = (
            stack.enter_context(serving(options.baseline[:7], old, model, max(streams))),
            stack.enter_context(serving("now", ROOT, model, max(streams))),
        )
        table = compare(servers, prompts, streams, options.rounds)
    Console().print(table)
    goals = ", ".join(f"{goal:.0f} ms at {count} streams" for count, goal in GOALS_MS.items())
    Console().print(f"goals: gap p50 at most {goals}; tokens/s no lower")


if __name__ == "__main__":
    main()
