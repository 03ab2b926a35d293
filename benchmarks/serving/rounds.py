"""Loads servers with streams in a closed loop, by turns, and compares what their readers see.

A gap is the time from one message with text to the next of the same answer, as its reader sees
them: messages that arrive in one read count as one. TTFT is the time from sending a request to the
first message with text. CPU time is that of all the server's processes. The client runs in this
process and shares the machine's cores with the servers, so it only notes when bytes arrive and
reads them after the round.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import psutil
import uvloop
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from benchmarks.serving.stream_client import Answer, closed_loop

PROMPT_WORDS, NUM_TOKENS = 50, 64

IDLE_CORES = 0.5
"""Servers that use no more than this of a core have ended their answers."""

IDLE_S = 0.5
IDLE_DEADLINE_S = 60


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
    ttft_p95: float
    tokens_per_s: float
    cpu_us_per_token: float


FIGURES: dict[str, Callable[[Round], float]] = {
    "gap p50 ms": lambda each: each.gap_p50,
    "gap p95 ms": lambda each: each.gap_p95,
    "TTFT p50 ms": lambda each: each.ttft_p50,
    "TTFT p95 ms": lambda each: each.ttft_p95,
    "tokens/s": lambda each: each.tokens_per_s,
    "CPU us/token": lambda each: each.cpu_us_per_token,
}


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the words that are one token each, with the space before them."""
    texts = (str(tokenizer.decode([token_id])) for token_id in range(len(tokenizer)))
    return [text for text in texts if text[:1] == " " and text[1:].isalpha()]


class Prompts:
    """Requests whose prompts differ from their first word on, so that no prefix is shared."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str) -> None:
        """Take a tokenizer's words, for a model of this name."""
        self._model = model
        self._words = words_of(tokenizer)
        self._random = random.Random(0)

    def requests(self, num_requests: int) -> list[bytes]:
        """Return new requests."""
        return [self._request() for _ in range(num_requests)]

    def _request(self) -> bytes:
        prompt = "".join(self._random.choices(self._words, k=PROMPT_WORDS)).strip()
        body = json.dumps(
            {
                "model": self._model,
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
    gap_p50, gap_p95 = np.percentile(gaps, (50, 95)).tolist()
    ttft_p50, ttft_p95 = np.percentile(ttfts, (50, 95)).tolist()
    return Round(
        gap_p50,
        gap_p95,
        ttft_p50,
        ttft_p95,
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


def wait_until_idle(servers: Sequence[Server]) -> None:
    """Wait until no server computes: some spin for seconds after their last answer.

    Raises:
        RuntimeError: One computes on without requests.
    """
    deadline_s = time.monotonic() + IDLE_DEADLINE_S
    while time.monotonic() < deadline_s:
        before_s, began_s = sum(cpu_s(each.process) for each in servers), time.monotonic()
        time.sleep(IDLE_S)
        used_s = sum(cpu_s(each.process) for each in servers) - before_s
        if used_s <= IDLE_CORES * (time.monotonic() - began_s):
            return
    raise RuntimeError(f"a server still computes {IDLE_DEADLINE_S} s after its last answer")


def compare(
    servers: tuple[Server, Server],
    prompts: Prompts,
    num_requests: Mapping[int, int],
    num_rounds: int,
) -> Table:
    """Measure by turns, and return a table of the medians and of the rounds' median ratios.

    Args:
        servers: The baseline, and the one that is compared with it.
        prompts: Makes the requests.
        num_requests: How many are sent in one round of a server, by the number of streams.
        num_rounds: How often each is measured; a round before these warms both up.
    """
    table = Table(title=f"Answers of {NUM_TOKENS} tokens")
    for column in ("streams", "figure", *(server.name for server in servers), "ratio"):
        table.add_column(column, justify="right")
    for num_streams, num_sent in num_requests.items():
        pairs = []
        for turn in range(num_rounds + 1):  # the first warms both up
            order = servers if turn % 2 else servers[::-1]
            rounds = {}
            for server in order:
                wait_until_idle(servers)
                rounds[server] = measure(server, prompts.requests(num_sent), num_streams)
            pairs.append([rounds[server] for server in servers])
        _add_rows(table, num_streams, pairs[1:])
    return table


def _add_rows(table: Table, num_streams: int, pairs: list[list[Round]]) -> None:
    for figure, value in FIGURES.items():
        old, new = (statistics.median(value(pair[at]) for pair in pairs) for at in (0, 1))
        ratio = statistics.median(value(pair[1]) / value(pair[0]) for pair in pairs)
        cells = (f"{old:.1f}", f"{new:.1f}", f"{ratio:.2f}")
        table.add_row(str(num_streams), figure, *cells, end_section=figure == [*FIGURES][-1])
