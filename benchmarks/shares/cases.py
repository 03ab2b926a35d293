"""The cases: each runs its load, adds figures to the report, and compares them with the bars."""

import time
from collections.abc import Callable, Coroutine, Sequence

import uvloop

from benchmarks.shares.batch import running_batch
from benchmarks.shares.client import NUM_TOKENS, Client, run_for
from benchmarks.shares.report import Report, points_of
from benchmarks.shares.server import KEYS

BACKLOGGED = ("one", "three")
NUM_CLIENTS = 128
"""Of each key. With 64 there were moments in which none of a key's requests waited at a replica:
clients need a while to ask again, and requests to arrive."""

NUM_CROWD = 50
NUM_LONG, LONG_TOKENS = 64, 512
CHAT_TOKENS = 16

LOW_PRIORITY = 10
WARM_UP_S = 2.0
"""The first seconds say more of the start than of the shares."""

MAX_ERROR, MIN_RATE = 0.10, 0.9

MOST_LINES_PER_S = 200
"""More lines of a batch than are answered in a second."""

FIRST_LINES = 16
"""Lines of a batch that are answered before it is measured."""

ClientOf = Callable[[str], Client]
"""Makes the client of a run, by the run's name."""

EngineSpeedOf = Callable[[Sequence[str]], float]


def warm_up(client_of: ClientOf) -> None:
    """Load a new server for a while, so that the first run does not measure its first requests."""
    run_for(WARM_UP_S, _clients(client_of("warm up"), "crowd", NUM_CROWD))


def measure_weights(client_of: ClientOf, seconds: float, case: str, report: Report) -> None:
    """Measure how two backlogged keys divide a model."""
    client = client_of(case)
    works = [work for key in BACKLOGGED for work in _clients(client, key, NUM_CLIENTS)]
    began_s, end_s = run_for(seconds, works)
    found = client.tokens_by_key(began_s + WARM_UP_S, end_s)
    weight = KEYS["three"] / KEYS["one"]
    ratio = found["three"] / found["one"]
    report.add(
        f"{case}: tokens of weight 3 beside weight 1",
        f"{ratio:.2f} ({found['three']} to {found['one']})",
        f"3 within {MAX_ERROR:.0%}",
        is_met=abs(ratio / weight - 1) <= MAX_ERROR,
    )
    report.add_refused(case, client.answers)
    report.tokens[case] = {key: points_of(client.of(key), began_s) for key in BACKLOGGED}


def measure_crowd(client_of: ClientOf, seconds: float, report: Report) -> None:
    """Measure a key with one client by itself, and beside a key with many."""
    for name, num_others, beside in (
        ("one client", 0, ""),
        ("one beside 50", NUM_CROWD, "one client"),
    ):
        client = client_of(name)
        works = [*_clients(client, "crowd", num_others), *_clients(client, "alone", 1)]
        _, end_s = run_for(seconds, works)
        report.add_ttfts(name, client.of("alone"), end_s, beside)


def measure_priorities(
    client_of: ClientOf, seconds: float, report: Report, chat_rate: float
) -> None:
    """Measure requests of a better priority beside long streams of a worse one.

    Args:
        client_of: See `ClientOf`.
        seconds: Of each measurement.
        report: Gets the figures.
        chat_rate: The requests a second of the better priority.
    """

    def long_streams(client: Client) -> list[Coroutine[None, None, None]]:
        options = {"num_tokens": LONG_TOKENS, "priority": LOW_PRIORITY}
        return _clients(client, "batch", NUM_LONG, **options)

    def chat(client: Client) -> Coroutine[None, None, None]:
        return client.ask_at_a_rate("chat", chat_rate, num_tokens=CHAT_TOKENS)

    idle_name, both_name = "chat, idle server", f"chat, beside {NUM_LONG} long streams"
    idle, batch, both = map(client_of, (idle_name, "long streams", both_name))
    _, end_s = run_for(seconds, [chat(idle)])
    report.add_ttfts(idle_name, idle.of("chat"), end_s)
    alone_rate = _tokens_per_s(batch, *run_for(seconds, long_streams(batch)))
    began_s, end_s = run_for(seconds, [*long_streams(both), chat(both)])
    report.add_ttfts(both_name, both.of("chat"), end_s, idle_name)
    rate = _tokens_per_s(both, began_s, end_s)
    report.add(
        "all tokens a second beside those of long streams by themselves",
        f"{rate / alone_rate:.2f} ({rate:.0f} to {alone_rate:.0f})",
        f"at least {MIN_RATE}",
        is_met=rate >= MIN_RATE * alone_rate,
    )
    compare_texts(both, client_of(both_name), report)


def measure_batch(
    client_of: ClientOf,
    seconds: float,
    report: Report,
    chat_rate: float,
    engine_speed_of: EngineSpeedOf,
) -> None:
    """Measure a batch by itself, beside the engine alone, and requests beside a batch.

    Args:
        client_of: See `ClientOf`.
        seconds: Of each measurement.
        report: Gets the figures.
        chat_rate: The requests a second beside the batch.
        engine_speed_of: Returns the tokens a second of the engine alone for texts like the batch's.
    """
    idle_name, both_name = "chat, server without a batch", "chat, beside a batch"
    idle, batch, both = map(client_of, (idle_name, "a batch by itself", both_name))
    num_lines = int(MOST_LINES_PER_S * (seconds + 2 * WARM_UP_S))
    _, end_s = run_for(seconds, [idle.ask_at_a_rate("chat", chat_rate, num_tokens=CHAT_TOKENS)])
    report.add_ttfts(idle_name, idle.of("chat"), end_s)
    engine_speed = engine_speed_of([client_of("engine").prompt("", str(at)) for at in range(256)])
    with running_batch(batch, num_lines, NUM_TOKENS) as running:
        running.wait_for(FIRST_LINES)
        began_s, num_before = time.perf_counter(), running.num_completed
        time.sleep(seconds)
        num_lines_done = running.num_completed - num_before
        speed = num_lines_done * NUM_TOKENS / (time.perf_counter() - began_s)
    report.add(
        "tokens a second of a batch beside those of the engine alone",
        f"{speed / engine_speed:.2f} ({speed:.0f} to {engine_speed:.0f})",
        f"at least {MIN_RATE}",
        is_met=speed >= MIN_RATE * engine_speed,
    )
    with running_batch(both, num_lines, NUM_TOKENS) as running:
        running.wait_for(FIRST_LINES)
        _, end_s = run_for(seconds, [both.ask_at_a_rate("chat", chat_rate, num_tokens=CHAT_TOKENS)])
    report.add_ttfts(both_name, both.of("chat"), end_s, idle_name)


def compare_texts(disturbed: Client, again: Client, report: Report) -> None:
    """Compare the long texts that a run has finished with the same prompts' without the chat.

    Args:
        disturbed: Has the answers of the run.
        again: Asks for them again. Its prompts are in the prefix cache, so it is not timed.
        report: Gets how many are the same.
    """
    texts = {each.name: each.text for each in disturbed.of("batch") if each.text is not None}
    options = {"num_tokens": LONG_TOKENS, "priority": LOW_PRIORITY}
    uvloop.run(again.ask_all("batch", texts, NUM_LONG, **options))
    num_equal = sum(each.text == texts[each.name] for each in again.answers)
    is_met = bool(texts) and num_equal == len(texts)
    report.add("long texts that are the same", f"{num_equal} of {len(texts)}", "all", is_met=is_met)


def _clients(
    client: Client, key: str, number: int, **options: int
) -> list[Coroutine[None, None, None]]:
    return [client.ask_for_ever(key, str(each), **options) for each in range(number)]


def _tokens_per_s(client: Client, began_s: float, end_s: float) -> float:
    since_s = began_s + WARM_UP_S
    return client.tokens_by_key(since_s, end_s).total() / (end_s - since_s)
