"""Measures fair shares and priorities: tokens by key over time, and the time to a first token.

It serves a random model of 3 million parameters as `make serve` does, with keys, and measures

- two keys of weights 1 and 3, each with more clients than its model's replicas run at once, behind
  one ingress with one replica, and behind two ingresses with two;
- a key with one client, by itself and beside a key with 50;
- long streams of low priority that fill two replicas, while requests of a better one come at a
  steady rate: their time to a first token beside that of an idle server, whether the long texts
  are the same, and tokens a second beside those of the long streams by themselves.

The client runs in this process and shares the machine's cores with the server, so it only notes
when lines arrive and reads them after the run.

Run: python -m benchmarks.shares [--seconds 60] [--cases weights,crowd,priorities] [--out FOLDER]
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import uvloop
import yaml
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_shapes import save_three_million
from benchmarks.free_port import free_ports
from benchmarks.peers.serve_model import configuration, environment, parsed
from benchmarks.serving.processes import started
from serve_app.commands.server_environment import HAPROXY_PORTS

MODEL = "three-million"
NUM_SLOTS = 8
"""Sequences that a replica runs at once."""

WEIGHTS = {"one": 1, "three": 3}
NUM_CLIENTS = 64
"""Of each key: more than all replicas' slots, so that both keys always wait."""

NUM_CROWD = 50
NUM_LONG, LONG_TOKENS = 64, 512
INTERACTIVE_RATE = 5.0
"""Requests a second."""

LOW, HIGH = 10, 0
WARM_UP_S = 2.0
"""What comes before says more of the start than of the shares."""

MAX_ERROR, MAX_TTFT_RATIO, MIN_RATE = 0.10, 1.5, 0.9


@dataclass(slots=True)
class Answer:
    """A streamed answer as it arrived.

    Attributes:
        name: What was asked for.
        sent_s: When.
        status: The HTTP status; None if none came.
        lines: The lines of events, each with its time.
    """

    name: str
    sent_s: float
    status: int | None = None
    lines: list[tuple[float, bytes]] = field(default_factory=list)

    def tokens(self) -> Iterator[tuple[float, int]]:
        """Yield how many tokens came, and when."""
        num_before = 0
        for time_s, message in self._messages():
            match message:
                case {"usage": {"completion_tokens": int(num_tokens)}} if num_tokens > num_before:
                    yield time_s, num_tokens - num_before
                    num_before = num_tokens

    @property
    def ttft_s(self) -> float:
        """The time to the first text; infinite if none came."""
        return next((time_s for time_s, _ in self.tokens()), float("inf")) - self.sent_s

    @property
    def text(self) -> str | None:
        """The text; None if the answer is not whole."""
        if not self.lines or self.lines[-1][1] != b"data: [DONE]\n":
            return None
        found = []
        for _, message in self._messages():
            match message:
                case {"choices": [{"delta": {"content": str(text)}}]}:
                    found.append(text)
        return "".join(found)

    def _messages(self) -> Iterator[tuple[float, object]]:
        for time_s, line in self.lines:
            if line.startswith(b"data: {"):
                yield time_s, json.loads(line.removeprefix(b"data: "))


class Client:
    """Sends requests of keys to one server; keeps all answers."""

    def __init__(self, port: int, words: Sequence[str]) -> None:
        """Start without answers.

        Args:
            port: The server's.
            words: What prompts are made of.
        """
        self.answers: list[Answer] = []
        self._port = port
        self._words = words

    async def ask(self, key: str, name: str, *, num_tokens: int = 64, priority: int = HIGH) -> None:
        """Send a request and read its answer, also if it is cut short.

        Args:
            key: Its key, which names the group of answers, too.
            name: Chooses its prompt, with the key.
            num_tokens: Tokens of the answer.
            priority: Its priority.
        """
        # Of its key's own: the other key would find it in the cache, and get more answers for it.
        prompt = "".join(random.Random(f"{key} {name}").choices(self._words, k=50)).strip()
        body = json.dumps(
            {
                "model": MODEL,
                "messages": [{"role": "user", "content": prompt}],
                "temperature": 0,
                "max_tokens": num_tokens,
                "ignore_eos": True,
                "priority": priority,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )
        answer = Answer(f"{key} {name}", time.perf_counter())
        self.answers.append(answer)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            writer.write(
                (
                    "POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\n"
                    f"Authorization: Bearer {secret_of(key)}\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n{body}"
                ).encode()
            )
            answer.status = int((await reader.readline()).split()[1])
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    answer.lines.append((time.perf_counter(), line))
        finally:
            writer.close()

    async def ask_for_ever(self, key: str, name: str, **options: int) -> None:
        """Send a request as soon as the answer to the last has ended."""
        number = 0
        while True:
            await self.ask(key, f"{name} {number}", **options)
            number += 1

    async def ask_at_a_rate(self, key: str, rate: float) -> None:
        """Send requests at a steady rate, whatever becomes of them."""
        async with asyncio.TaskGroup() as group:
            for number in range(sys.maxsize):
                group.create_task(self.ask(key, str(number), num_tokens=16))
                await asyncio.sleep(1 / rate)

    def of(self, key: str) -> list[Answer]:
        """Return the answers to a key's requests."""
        return [answer for answer in self.answers if answer.name.split()[0] == key]


@asynccontextmanager
async def loaded(client: Client, seconds: float) -> AsyncIterator[list["asyncio.Task[None]"]]:
    """Run the tasks that the block adds for some seconds, then cut them short."""
    tasks: list[asyncio.Task[None]] = []
    yield tasks
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(outcome, Exception):
            raise outcome


def secret_of(key: str) -> str:
    """Return the secret of a key of this benchmark's server."""
    return f"secret-of-the-key-{key}"


@contextmanager
def serving(folder: Path, out: Path, num_ingresses: int, num_replicas: int) -> Iterator[int]:
    """Serve the model until the block ends; return the port."""
    port, *others = free_ports(1 + len(HAPROXY_PORTS))
    keys = [*(WEIGHTS | {"crowd": 1, "alone": 1, "batch": 1, "chat": 1}).items()]
    (folder / "keys.yaml").write_text(
        yaml.safe_dump(
            {
                "keys": [
                    {
                        "name": name,
                        "sha256": sha256(secret_of(name).encode()).hexdigest(),
                        "weight": weight,
                    }
                    for name, weight in keys
                ]
            }
        )
    )
    arguments = ["--port", str(port), "--model", str(folder / MODEL), "--num-threads", "1"]
    arguments += ["--max-model-len", "1024", "--max-num-seqs", str(NUM_SLOTS)]
    arguments += ["--max-queued-requests", str(2 * NUM_CLIENTS)]
    config = configuration(parsed(arguments))
    application = config["applications"][0]
    application["args"]["auth"]["api_keys_file"] = str(folder / "keys.yaml")
    application["args"]["models"][0]["num_cpus"] = 0.4
    for section, number in zip(
        application["deployments"], (num_ingresses, num_replicas), strict=True
    ):
        section["autoscaling_config"] |= {"min_replicas": number, "max_replicas": number}
    file = folder / f"{num_ingresses}-{num_replicas}.yaml"
    file.write_text(yaml.safe_dump(config))
    serve = str(Path(sys.executable).with_name("serve"))
    with started(
        [serve, "run", "--address", "local", str(file)],
        f"http://127.0.0.1:{port}/ready",
        log=out / f"{num_ingresses}-{num_replicas}.log",
        cwd=Path(__file__).resolve().parent.parent,
        environment=environment() | dict(zip(HAPROXY_PORTS, map(str, others), strict=True)),
    ):
        yield port


@dataclass(slots=True)
class Report:
    """What was found, in the order in which it was measured.

    Attributes:
        rows: What was measured, the figure, and the bar for it.
        are_met: Whether each bar is met.
        tokens: Each key's tokens, by the name of the case: times and weighted totals.
        ttfts_ms: The times to first tokens in ascending order, by what was asked.
    """

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    are_met: list[bool] = field(default_factory=list)
    tokens: dict[str, dict[str, list[tuple[float, float]]]] = field(default_factory=dict)
    ttfts_ms: dict[str, list[float]] = field(default_factory=dict)

    def add(self, what: str, found: str, bar: str = "", *, is_met: bool = True) -> None:
        """Add a figure, and whether it meets its bar."""
        self.rows.append((what, found, bar))
        self.are_met.append(is_met)

    def add_ttfts(self, name: str, answers: Sequence[Answer], beside: str = "") -> None:
        """Add times to first tokens, and compare their p95 with an earlier one's."""
        found = sorted(1e3 * each.ttft_s for each in answers if each.status == 200 and each.lines)
        self.ttfts_ms[name] = found
        p95 = percentile(found, 0.95)
        refused = sum(each.status not in (200, None) for each in answers)
        self.add(f"{name}: TTFT p50, p95", f"{statistics.median(found):.0f}, {p95:.0f} ms")
        self.add(f"{name}: refused", str(refused), "0", is_met=not refused)
        if beside:
            ratio = p95 / percentile(self.ttfts_ms[beside], 0.95)
            bar = f"at most {MAX_TTFT_RATIO}"
            is_met = ratio <= MAX_TTFT_RATIO
            self.add(f"{name}: p95 beside {beside}", f"{ratio:.2f}", bar, is_met=is_met)

    def table(self) -> Table:
        """Return all figures."""
        table = Table(title="Shares and priorities")
        for column in ("what", "found", "bar", ""):
            table.add_column(column)
        for row, is_met in zip(self.rows, self.are_met, strict=True):
            table.add_row(*row, "" if not row[2] else "met" if is_met else "missed")
        return table

    def figure(self) -> Figure:
        """Return plots of each key's tokens over time, and of the times to first tokens."""
        figure = Figure(figsize=(6 * (len(self.tokens) + 1), 5), layout="constrained")
        *plots, last = figure.subplots(1, len(self.tokens) + 1, squeeze=False)[0]
        for axes, (case, keys) in zip(plots, self.tokens.items(), strict=True):
            for key, points in keys.items():
                axes.plot(*zip(*points, strict=True), label=f"key {key}")
            axes.set(title=f"Tokens by key, {case}", xlabel="seconds", ylabel="tokens")
            axes.legend()
        for name, found in self.ttfts_ms.items():
            parts = [(number + 1) / len(found) for number in range(len(found))]
            last.plot(found, parts, label=name)
        last.set(title="Time to a first token", xlabel="ms", ylabel="part of the requests")
        last.set_xscale("log")
        if self.ttfts_ms:
            last.legend()
        return figure


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the value that a part of the values is at most."""
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def tokens_by_key(client: Client, since_s: float, until_s: float) -> Counter[str]:
    """Return the tokens that came between two times."""
    found: Counter[str] = Counter()
    for answer in client.answers:
        for time_s, num_tokens in answer.tokens():
            if since_s <= time_s < until_s:
                found[answer.name.split()[0]] += num_tokens
    return found


def measure_weights(client: Client, seconds: float, case: str, report: Report) -> None:
    """Measure how two backlogged keys divide a model."""

    async def run() -> None:
        async with loaded(client, seconds) as tasks:
            for key in WEIGHTS:
                for number in range(NUM_CLIENTS):
                    work = client.ask_for_ever(key, str(number))
                    tasks.append(asyncio.create_task(work))

    began_s = time.perf_counter()
    uvloop.run(run())
    found = tokens_by_key(client, began_s + WARM_UP_S, began_s + seconds)
    ratio = found["three"] / found["one"]
    error = abs(ratio / WEIGHTS["three"] - 1)
    report.add(
        f"{case}: tokens of weight 3 beside weight 1",
        f"{ratio:.2f} ({found['three']} to {found['one']})",
        f"3 within {MAX_ERROR:.0%}",
        is_met=error <= MAX_ERROR,
    )
    refused = sum(each.status not in (200, None) for each in client.answers)
    report.add(f"{case}: refused", str(refused), "0", is_met=not refused)
    report.tokens[case] = {key: points_of(client.of(key), began_s) for key in WEIGHTS}


def points_of(answers: Sequence[Answer], began_s: float) -> list[tuple[float, float]]:
    """Return all tokens that had come by each whole second."""
    by_second: Counter[int] = Counter()
    for answer in answers:
        for time_s, num_tokens in answer.tokens():
            by_second[int(time_s - began_s) + 1] += num_tokens
    total, points = 0.0, [(0.0, 0.0)]
    for second in sorted(by_second):
        total += by_second[second]
        points.append((float(second), total))
    return points


def measure_crowd(port: int, words: Sequence[str], seconds: float, report: Report) -> None:
    """Measure a key with one client by itself, and beside a key with many."""

    async def run(client: Client, num_others: int) -> None:
        async with loaded(client, seconds) as tasks:
            for number in range(num_others):
                work = client.ask_for_ever("crowd", str(number))
                tasks.append(asyncio.create_task(work))
            tasks.append(asyncio.create_task(client.ask_for_ever("alone", "0")))

    for name, num_others, beside in (
        ("one client", 0, ""),
        ("one beside 50", NUM_CROWD, "one client"),
    ):
        client = Client(port, words)
        uvloop.run(run(client, num_others))
        report.add_ttfts(name, client.of("alone"), beside)


def measure_priorities(port: int, words: Sequence[str], seconds: float, report: Report) -> None:
    """Measure requests of a better priority beside long streams of a worse one."""

    async def run(client: Client, *, has_long: bool, has_chat: bool) -> None:
        async with loaded(client, seconds) as tasks:
            if has_long:
                for number in range(NUM_LONG):
                    work = client.ask_for_ever(
                        "batch", str(number), num_tokens=LONG_TOKENS, priority=LOW
                    )
                    tasks.append(asyncio.create_task(work))
            if has_chat:
                work = client.ask_at_a_rate("chat", INTERACTIVE_RATE)
                tasks.append(asyncio.create_task(work))

    idle, batch, both = (Client(port, words) for _ in range(3))
    uvloop.run(run(idle, has_long=False, has_chat=True))
    report.add_ttfts("chat, idle server", idle.of("chat"))
    rates = []
    for client, has_chat in ((batch, False), (both, True)):
        began_s = time.perf_counter()
        uvloop.run(run(client, has_long=True, has_chat=has_chat))
        found = tokens_by_key(client, began_s + WARM_UP_S, began_s + seconds)
        rates.append(sum(found.values()) / (seconds - WARM_UP_S))
    report.add_ttfts("chat, beside 64 long streams", both.of("chat"), "chat, idle server")
    rate = rates[1] / rates[0]
    report.add(
        "all tokens a second beside those of long streams by themselves",
        f"{rate:.2f} ({rates[1]:.0f} to {rates[0]:.0f})",
        f"at least {MIN_RATE}",
        is_met=rate >= MIN_RATE,
    )
    texts = {each.name: each.text for each in batch.of("batch") if each.text is not None}
    pairs = [
        (texts[each.name], each.text)
        for each in both.of("batch")
        if each.text is not None and each.name in texts
    ]
    num_equal = sum(alone == beside for alone, beside in pairs)
    is_met = bool(pairs) and num_equal == len(pairs)
    report.add("long texts that are the same", f"{num_equal} of {len(pairs)}", "all", is_met=is_met)


def main() -> None:
    """Measure, print the table, and draw the plots."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60, help="of each measurement")
    parser.add_argument("--cases", default="weights,crowd,priorities")
    parser.add_argument(
        "--out", type=Path, default=Path("build"), help="the folder of the plots and logs"
    )
    options = parser.parse_args()
    cases, report = options.cases.split(","), Report()
    options.out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = save_three_million(folder / MODEL)
        texts = (str(tokenizer.decode([token_id])) for token_id in range(len(tokenizer)))
        words = [text for text in texts if text[:1] == " " and text[1:].isalpha()]
        if {"weights", "crowd"} & {*cases}:
            with serving(folder, options.out, 1, 1) as port:
                if "weights" in cases:
                    measure_weights(Client(port, words), options.seconds, "one ingress", report)
                if "crowd" in cases:
                    measure_crowd(port, words, options.seconds, report)
        if {"weights", "priorities"} & {*cases}:
            with serving(folder, options.out, 2, 2) as port:
                if "weights" in cases:
                    measure_weights(Client(port, words), options.seconds, "two ingresses", report)
                if "priorities" in cases:
                    measure_priorities(port, words, options.seconds, report)
    Console().print(report.table())
    report.figure().savefig(options.out / "shares.svg", format="svg")
    if not all(report.are_met):
        sys.exit("a bar is missed")


if __name__ == "__main__":
    main()
